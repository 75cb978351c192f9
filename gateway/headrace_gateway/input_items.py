"""The input of the Responses API: checks its items, and turns them into chat messages."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from headrace_gateway.ids import item_id
from headrace_gateway.problems import Problems, named, shown

ROLES: Final = ("user", "assistant", "system", "developer")
STATUSES: Final = ("in_progress", "completed", "incomplete")
FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "message": ("type", "id", "status", "role", "content", "phase"),
    "function_call": ("type", "id", "status", "call_id", "name", "arguments"),
    "function_call_output": ("type", "id", "status", "call_id", "output"),
    "reasoning": ("type", "id", "status", "summary", "content", "encrypted_content"),
}
_PREFIXES: Final = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_TEXT_PARTS: Final = ("input_text", "output_text", "text", "refusal")
_PART_FIELDS: Final = ("type", "text", "refusal", "annotations", "logprobs", "prompt_cache_breakpoint")

Item = dict[str, Any]


def read_items(given: Any, problems: Problems) -> list[Item]:
    """Check `input` and return its items in one format, without ids if the caller gave none."""
    if isinstance(given, str):
        content = [{"type": "input_text", "text": given}]
        return [{"type": "message", "status": "completed", "role": "user", "content": content}]
    if not isinstance(given, list) or not given:
        told = "an empty array" if given == [] else shown(given)
        problems.add("input", f"input must be a string or an array of at least one item, not {told}")
        return []
    read = [_read(f"input[{position}]", item, problems) for position, item in enumerate(given)]
    seen: set[str] = set()
    for position, item in enumerate(read):
        identity = item.get("id") if item is not None else None
        if identity in seen:
            message = f"input[{position}].id is the id of an earlier item: leave it out, or use another one"
            problems.add(f"input[{position}].id", message)
        elif identity is not None:
            seen.add(identity)
    return [item for item in read if item is not None]


def with_ids(items: Sequence[Item], response_id: str) -> tuple[Item, ...]:
    """Return the items as a response lists them: each has an id, either its own or a derived one."""
    return tuple(
        {"id": item_id(_PREFIXES[item["type"]], response_id, f"i{place}"), **item} for place, item in enumerate(items)
    )


def _read(path: str, item: Any, problems: Problems) -> Item | None:
    if not isinstance(item, Mapping):
        problems.add(path, f"{path} must be an object, not {shown(item)}")
        return None
    given = {name: value for name, value in item.items() if value is not None}
    kind = given.get("type", "message")
    if not isinstance(kind, str) or kind not in FIELDS:
        problems.add(
            f"{path}.type", f"{path}.type must be one of {', '.join(FIELDS)}, not {named(kind)}", "unsupported"
        )
        return None
    problems.unknown_fields(path, given, FIELDS[kind])
    identity, status = given.get("id"), given.get("status", "completed")
    if identity is not None and (not isinstance(identity, str) or not 1 <= len(identity) <= 128):
        problems.add(f"{path}.id", f"{path}.id must be a string of 1 to 128 characters, not {shown(identity)}")
    if status not in STATUSES:
        problems.add(f"{path}.status", f"{path}.status must be one of {', '.join(STATUSES)}")
    read: Item = {"id": identity} if isinstance(identity, str) else {}
    read |= {"type": kind, "status": status}
    readers = {"message": _read_message, "reasoning": _read_reasoning, "function_call": _read_call}
    return read | readers.get(kind, _read_output)(path, given, problems)


def _read_message(path: str, given: Mapping[str, Any], problems: Problems) -> Item:
    role = given.get("role")
    if role not in ROLES:
        problems.add(f"{path}.role", f"{path}.role must be one of {', '.join(ROLES)}, not {named(role)}")
        role = "user"
    return {"role": role, "content": _read_content(f"{path}.content", given.get("content"), str(role), problems)}


def _read_content(path: str, content: Any, role: str, problems: Problems) -> list[dict[str, Any]]:
    own = "output_text" if role == "assistant" else "input_text"
    if isinstance(content, str):
        return [_part(own, content)]
    if not isinstance(content, list):
        problems.add(path, f"{path} must be a string or an array of text parts, not {shown(content)}")
        return []
    parts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        where = f"{path}[{number}]"
        if kind not in _TEXT_PARTS:
            problems.add(f"{where}.type", f"{where}.type is {named(kind)}, but only text is supported", "unsupported")
            continue
        problems.unknown_fields(where, part, _PART_FIELDS)
        text = part.get("refusal" if kind == "refusal" else "text")
        if isinstance(text, str):
            parts.append(_part(own, text))
        else:
            name = "refusal" if kind == "refusal" else "text"
            problems.add(f"{where}.{name}", f"{where}.{name} must be a string, not {shown(text)}")
    return parts


def _part(kind: str, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": kind, "text": text}
    return {**part, "annotations": [], "logprobs": []} if kind == "output_text" else part


def _read_reasoning(path: str, given: Mapping[str, Any], problems: Problems) -> Item:
    if given.get("encrypted_content"):
        message = f"{path}.encrypted_content is not supported: send the reasoning in content or summary"
        problems.add(f"{path}.encrypted_content", message, "unsupported")
    return {
        "summary": _reasoning_parts(f"{path}.summary", given.get("summary", []), "summary_text", problems),
        "content": _reasoning_parts(f"{path}.content", given.get("content", []), "reasoning_text", problems),
    }


def _reasoning_parts(path: str, parts: Any, kind: str, problems: Problems) -> list[dict[str, Any]]:
    if isinstance(parts, list) and all(
        isinstance(part, Mapping) and part.get("type") == kind and isinstance(part.get("text"), str) for part in parts
    ):
        return [{"type": kind, "text": part["text"]} for part in parts]
    problems.add(path, f"{path} must be an array of objects with type {kind} and a text")
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
        problems.add(f"{path}.{name}", f"{path}.{name} must be a string, not {shown(value)}")
    return str(value)


def messages_of(items: Sequence[Item], *, knows_developer: bool) -> list[dict[str, Any]]:
    """Return the chat messages. All that an assistant thought, said and called in one turn becomes one message."""
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
    """Add the item to the assistant's last message, if it may follow what that message has so far."""
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
    return "".join(part["text"] for part in parts)
