"""The messages of a chat: translates OpenAI's roles and content parts for the queue."""

from collections.abc import Mapping
from typing import Any, Final

from headrace_gateway.requests.problems import Problems
from headrace_wire.codes import ErrorCode
from headrace_wire.values import named, shown

ROLES: Final = ("developer", "system", "user", "assistant", "tool")
_FIELDS: Final = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content")
_CALL_FIELDS: Final = ("id", "type", "index", "function")
_WITHOUT_EFFECT: Final = ("refusal", "annotations", "audio", "function_call")
"""Fields that the API's answers have, and that callers therefore send back."""


def read_messages(messages: Any, problems: Problems, *, knows_developer: bool) -> list[dict[str, Any]]:
    """Check roles and contents. The queue's own rules check the rest.

    Args:
        knows_developer: the chat template supports the role `developer`; otherwise it becomes `system`.
    """
    if not isinstance(messages, list) or not messages:
        told = "an empty list" if messages == [] else shown(messages)
        problems.must("messages", "be a list of at least one message", told)
        return []
    return [_read(position, message, problems, knows_developer) for position, message in enumerate(messages)]


def _read(position: int, message: Any, problems: Problems, knows_developer: bool) -> dict[str, Any]:
    path = f"messages[{position}]"
    if not isinstance(message, Mapping):
        problems.must(path, "be a map of role and content", shown(message))
        return {}
    given = message
    role = given.get("role")
    if role not in ROLES:
        hint = ": use the role tool" if role == "function" else ""
        problems.add(f"{path}.role", f"{path}.role must be one of {', '.join(ROLES)}, got {named(role)}{hint}")
        return {}
    for name in given:
        if name in _WITHOUT_EFFECT and not given[name]:
            continue
        if name in ("audio", "function_call"):
            problems.unsupported(f"{path}.{name}", f"{path}.{name} is not supported: use content and tool_calls")
        elif name not in _FIELDS and not (role == "assistant" and name in ("refusal", "annotations")):
            problems.ignore(f"{path}.{name[:64]}", f"{path} has the unknown field {name[:64]!r}")
    read = {name: given[name] for name in _FIELDS if name in given}
    if isinstance(read.get("tool_calls"), list):
        read["tool_calls"] = [_known(f"{path}.tool_calls[]", call, problems) for call in read["tool_calls"]]
    read["role"] = "system" if role == "developer" and not knows_developer else role
    if isinstance(given.get("content"), list):
        read["content"] = _joined(path, given["content"], problems)
    elif "content" in given and not isinstance(given["content"], str):
        told = shown(given["content"])
        problems.must(f"{path}.content", "be a string or a list of text parts", told)
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


def _known(path: str, call: Any, problems: Problems) -> Any:
    """Return a call without its unknown fields. The queue's own rules check the others."""
    if not isinstance(call, Mapping):
        return call
    problems.unknown_fields(path, call, _CALL_FIELDS)
    return {name: call[name] for name in _CALL_FIELDS if name in call}


def _joined(path: str, parts: list[Any], problems: Problems) -> str:
    texts = []
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if kind not in ("text", "refusal"):
            where = f"{path}.content[{number}].type"
            problems.must(where, "be text", named(kind), ErrorCode.UNSUPPORTED)
        elif not isinstance(text, str):
            where = f"{path}.content[{number}].{'refusal' if kind == 'refusal' else 'text'}"
            problems.must(where, "be a string", shown(text))
        else:
            texts.append(text)
    return "\n".join(texts)
