"""The messages of a chat: translates OpenAI's roles and content parts for the queue."""

from collections.abc import Mapping
from typing import Any, Final

from headrace_gateway.problems import Problems, named, shown

ROLES: Final = ("developer", "system", "user", "assistant", "tool")
_FIELDS: Final = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content")
_WITHOUT_EFFECT: Final = ("refusal", "annotations", "audio", "function_call")
"""Fields that the API's answers have, and that callers therefore send back."""


def read_messages(messages: Any, problems: Problems, *, knows_developer: bool) -> list[dict[str, Any]]:
    """Check roles and contents. The queue's own rules check the rest.

    Args:
        knows_developer: the chat template supports the role `developer`; otherwise it becomes `system`.
    """
    if not isinstance(messages, list) or not messages:
        told = "an empty array" if messages == [] else shown(messages)
        problems.add("messages", f"messages must be an array of at least one message, not {told}")
        return []
    return [_read(position, message, problems, knows_developer) for position, message in enumerate(messages)]


def _read(position: int, message: Any, problems: Problems, knows_developer: bool) -> dict[str, Any]:
    path = f"messages[{position}]"
    if not isinstance(message, Mapping):
        problems.add(path, f"{path} must be an object of role and content, not {shown(message)}")
        return {}
    given = {name: value for name, value in message.items() if value is not None}
    role = given.get("role")
    if role not in ROLES:
        hint = ": use the role tool" if role == "function" else ""
        problems.add(f"{path}.role", f"{path}.role must be one of {', '.join(ROLES)}, not {named(role)}{hint}")
        return {}
    for name in given:
        if name in _WITHOUT_EFFECT and not given[name]:
            continue
        if name not in _FIELDS and not (role == "assistant" and name in ("refusal", "annotations")):
            problems.unsupported(f"{path}.{name[:64]}", f"{path} has the unknown field {name[:64]!r}")
    read = {name: given[name] for name in _FIELDS if name in given}
    read["role"] = "system" if role == "developer" and not knows_developer else role
    if isinstance(given.get("content"), list):
        read["content"] = _joined(path, given["content"], problems)
    elif "content" in given and not isinstance(given["content"], str):
        told = shown(given["content"])
        problems.add(f"{path}.content", f"{path}.content must be a string or an array of text parts, not {told}")
    elif "content" not in given and not (role == "assistant" and given.get("tool_calls")):
        if role == "assistant" and isinstance(given.get("refusal"), str):
            read["content"] = given["refusal"]
        else:
            problems.add(f"{path}.content", f"{path}.content is required")
    if "tool_calls" in read and role != "assistant":
        problems.add(f"{path}.tool_calls", f"{path}.tool_calls is allowed only in a message with the role assistant")
    if role == "tool" and "tool_call_id" not in read:
        problems.add(f"{path}.tool_call_id", f"{path}.tool_call_id is required: it names the answered call")
    return read


def _joined(path: str, parts: list[Any], problems: Problems) -> str:
    texts = []
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if kind not in ("text", "refusal"):
            where = f"{path}.content[{number}].type"
            problems.add(where, f"{where} is {named(kind)}, but only text is supported", "unsupported")
        elif not isinstance(text, str):
            where = f"{path}.content[{number}].{'refusal' if kind == 'refusal' else 'text'}"
            problems.add(where, f"{where} must be a string, not {shown(text)}")
        else:
            texts.append(text)
    return "".join(texts)
