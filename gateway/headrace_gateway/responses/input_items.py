"""The input of the Responses API: checks its items, and turns them into chat messages."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from headrace_gateway.requests.problems import Problems
from headrace_wire.codes import ErrorCode
from headrace_wire.values import named, shown

ROLES: Final = ("user", "assistant", "system", "developer")
STATUSES: Final = ("in_progress", "completed", "incomplete")
FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "message": ("type", "id", "status", "role", "content", "phase"),
    "function_call": ("type", "id", "status", "call_id", "name", "arguments"),
    "function_call_output": ("type", "id", "status", "call_id", "output"),
    "reasoning": ("type", "id", "status", "summary", "content", "encrypted_content"),
}
_TEXT_PARTS: Final = ("input_text", "output_text", "text", "refusal")
_PART_FIELDS: Final = ("type", "text", "refusal", "annotations", "logprobs", "prompt_cache_breakpoint")

Item = dict[str, Any]


def read_items(given: Any, problems: Problems) -> list[Item]:
    """Check `input` and return its items in one format, without ids if the caller gave none."""
    if isinstance(given, str):
        content = [{"type": "input_text", "text": given}]
        return [{"type": "message", "status": "completed", "role": "user", "content": content}]
    if not isinstance(given, list) or not given:
        told = "an empty list" if given == [] else shown(given)
        problems.must("input", "be a string or a list of at least one item", told)
        return []
    read = [_read(f"input[{position}]", item, problems) for position, item in enumerate(given)]
    seen: set[str] = set()
    for position, item in enumerate(read):
        identity = item.get("id") if item is not None else None
        if identity in seen:
            problems.add(
                f"input[{position}].id",
                f"input[{position}].id is the id of an earlier item: leave it out, or use another one",
            )
        elif identity is not None:
            seen.add(identity)
    return [item for item in read if item is not None]


def _read(path: str, item: Any, problems: Problems) -> Item | None:
    if not isinstance(item, Mapping):
        problems.must(path, "be a map", shown(item))
        return None
    given = item
    kind = given.get("type", "message")
    if not isinstance(kind, str) or kind not in FIELDS:
        problems.must(f"{path}.type", f"be one of {', '.join(FIELDS)}", named(kind), ErrorCode.UNSUPPORTED)
        return None
    problems.unknown_fields(path, given, FIELDS[kind])
    identity, status = given.get("id"), given.get("status", "completed")
    if identity is not None and (not isinstance(identity, str) or not 1 <= len(identity) <= 128):
        problems.must(f"{path}.id", "be a string of 1 to 128 characters", shown(identity))
    if status not in STATUSES:
        problems.must(f"{path}.status", f"be one of {', '.join(STATUSES)}", named(status))
    read: Item = {"id": identity} if isinstance(identity, str) else {}
    read |= {"type": kind, "status": status}
    readers = {"message": _read_message, "reasoning": _read_reasoning, "function_call": _read_call}
    return read | readers.get(kind, _read_output)(path, given, problems)


def _read_message(path: str, given: Mapping[str, Any], problems: Problems) -> Item:
    role = given.get("role")
    if role not in ROLES:
        problems.must(f"{path}.role", f"be one of {', '.join(ROLES)}", named(role))
        role = "user"
    return {"role": role, "content": _read_content(f"{path}.content", given.get("content"), str(role), problems)}


def _read_content(path: str, content: Any, role: str, problems: Problems) -> list[dict[str, Any]]:
    own = "output_text" if role == "assistant" else "input_text"
    if isinstance(content, str):
        return [_part(own, content)]
    if not isinstance(content, list):
        problems.must(path, "be a string or a list of text parts", shown(content))
        return []
    parts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        where = f"{path}[{number}]"
        if kind not in _TEXT_PARTS:
            problems.must(f"{where}.type", f"be {' or '.join(_TEXT_PARTS[:2])}", named(kind), ErrorCode.UNSUPPORTED)
            continue
        problems.unknown_fields(where, part, _PART_FIELDS)
        text = part.get("refusal" if kind == "refusal" else "text")
        if isinstance(text, str):
            parts.append(_part(own, text))
        else:
            name = "refusal" if kind == "refusal" else "text"
            problems.must(f"{where}.{name}", "be a string", shown(text))
    return parts


def _part(kind: str, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": kind, "text": text}
    return {**part, "annotations": [], "logprobs": []} if kind == "output_text" else part


def _read_reasoning(path: str, given: Mapping[str, Any], problems: Problems) -> Item:
    if given.get("encrypted_content") not in (None, ""):
        problems.add(
            f"{path}.encrypted_content",
            f"{path}.encrypted_content is not supported: send the reasoning in content or summary",
            ErrorCode.UNSUPPORTED,
        )
    return {
        "summary": _reasoning_parts(f"{path}.summary", given.get("summary", []), "summary_text", problems),
        "content": _reasoning_parts(f"{path}.content", given.get("content", []), "reasoning_text", problems),
    }


def _reasoning_parts(path: str, parts: Any, kind: str, problems: Problems) -> list[dict[str, Any]]:
    if isinstance(parts, list) and all(
        isinstance(part, Mapping) and part.get("type") == kind and isinstance(part.get("text"), str) for part in parts
    ):
        return [{"type": kind, "text": part["text"]} for part in parts]
    problems.must(path, f"be a list of maps with type {kind} and a text", shown(parts))
    return []


def _read_call(path: str, given: Mapping[str, Any], problems: Problems) -> Item:
    return {name: _string(path, name, given, problems) for name in ("call_id", "name", "arguments")}


def _read_output(path: str, given: Mapping[str, Any], problems: Problems) -> Item:
    call_id, output = _string(path, "call_id", given, problems), given.get("output")
    if not isinstance(output, str):
        output = _read_content(f"{path}.output", output, "tool", problems)
    return {"call_id": call_id, "output": output}


def _string(path: str, name: str, given: Mapping[str, Any], problems: Problems) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        problems.must(f"{path}.{name}", "be a string", shown(value))
    return str(value)


def messages_of(items: Sequence[Item], *, knows_developer: bool) -> list[dict[str, Any]]:
    """Return the chat messages. The reasoning, the text and the calls of one assistant turn become one message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        if item["type"] == "function_call_output":
            output = item["output"]
            text = output if isinstance(output, str) else _joined(output)
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
        elif item["type"] == "message" and item["role"] != "assistant":
            role = "system" if item["role"] == "developer" and not knows_developer else item["role"]
            messages.append({"role": role, "content": _joined(item["content"])})
        else:
            _add_turn(messages, item)
    for message in messages:
        if message["role"] == "assistant" and "tool_calls" not in message:
            message.setdefault("content", "")
    return messages


def _add_turn(messages: list[dict[str, Any]], item: Item) -> None:
    """Add the item to the last message if the assistant's turn can contain it there, else to a new message."""
    parts = ("reasoning_content", "content", "tool_calls")
    kinds = {"reasoning": 0, "message": 1, "function_call": 2}
    rank = kinds[item["type"]]
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    taken = parts[rank if rank < 2 else 3 :]
    if last is None or any(part in last for part in taken):
        last = {"role": "assistant"}
        messages.append(last)
    if rank == 0:
        last["reasoning_content"] = _joined(item.get("content") or item["summary"])
    elif rank == 1:
        last["content"] = _joined(item["content"])
    else:
        function = {"name": item["name"], "arguments": item["arguments"]}
        last.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})


def _joined(parts: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(part["text"] for part in parts)
