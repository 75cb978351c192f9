"""Translates the conversation of Anthropic's Messages API into chat messages.

Text blocks are joined by line breaks. Each tool result becomes a message of its own, before the text of its turn.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from headrace_gateway.requests.problems import Problems
from headrace_wire.chat import MAX_MESSAGES
from headrace_wire.codes import ErrorCode
from headrace_wire.values import named, shown

_JOINT: Final = "\n"
_TEXT_FIELDS: Final = ("type", "text", "cache_control", "citations")
_RESULT_FIELDS: Final = ("type", "tool_use_id", "content", "is_error", "cache_control")
_USE_FIELDS: Final = ("type", "id", "name", "input", "cache_control", "caller")
_THINKING_FIELDS: Final = ("type", "thinking", "signature", "cache_control")
USER_BLOCKS: Final = ("text", "tool_result")
ASSISTANT_BLOCKS: Final = ("text", "tool_use", "thinking")

Message = dict[str, Any]


def read_conversation(messages: Any, problems: Problems) -> list[Message]:
    """Check `messages` and translate them. Consecutive turns of one role are merged."""
    if not isinstance(messages, list) or not messages:
        told = "an empty list" if messages == [] else shown(messages)
        problems.must("messages", "be a list of at least one message", told)
        return []
    if len(messages) > MAX_MESSAGES:
        problems.add("messages", f"messages must hold at most {MAX_MESSAGES} messages, got {len(messages)}")
        return []
    read: list[Message] = []
    for position, message in enumerate(messages):
        path = f"messages[{position}]"
        if not isinstance(message, Mapping):
            problems.must(path, "be a map of role and content", shown(message))
            continue
        problems.unknown_fields(path, message, ("role", "content"))
        role, content = message.get("role"), message.get("content")
        if role == "user":
            _read_user(content, f"{path}.content", read, problems)
        elif role == "assistant":
            _read_assistant(content, f"{path}.content", read, problems)
        elif role == "system":
            read.append({"role": "system", "content": [text_of(content, f"{path}.content", problems)]})
        else:
            problems.must(f"{path}.role", "be user, assistant or system", named(role))
    return [_joined(message) for message in read]


def text_of(content: Any, path: str, problems: Problems) -> str:
    """Return the text of a string, or of an array of text blocks."""
    if isinstance(content, str):
        return content
    blocks = _blocks(content, path, ("text",), problems)
    return _JOINT.join(_text(block, where, problems) for where, block in blocks)


def _read_user(content: Any, path: str, read: list[Message], problems: Problems) -> None:
    if isinstance(content, str):
        _add(read, "user", content)
        return
    texts = []
    for where, block in _blocks(content, path, USER_BLOCKS, problems):
        if block["type"] == "text":
            texts.append(_text(block, where, problems))
        else:
            read.append(_result(block, where, problems))
    if texts:
        _add(read, "user", _JOINT.join(texts))


def _read_assistant(content: Any, path: str, read: list[Message], problems: Problems) -> None:
    if isinstance(content, str):
        _add(read, "assistant", content)
        return
    texts, thoughts, calls = [], [], []
    for where, block in _blocks(content, path, ASSISTANT_BLOCKS, problems):
        if block["type"] == "text":
            texts.append(_text(block, where, problems))
        elif block["type"] == "thinking":
            problems.unknown_fields(where, block, _THINKING_FIELDS)
            thoughts.append(_string(block, "thinking", where, problems))
        else:
            calls.append(_call(block, where, problems))
    extra: dict[str, list[Any]] = {}
    if thoughts:
        extra["reasoning_content"] = thoughts
    if calls:
        extra["tool_calls"] = calls
    _add(read, "assistant", _JOINT.join(texts), extra)


def _add(read: list[Message], role: str, text: str, extra: dict[str, list[Any]] | None = None) -> None:
    """Add a message, or extend the last one. Texts stay in lists: joining them turn by turn would be quadratic."""
    last = read[-1] if read else None
    if last is None or last["role"] != role or "tool_calls" in last:
        read.append({"role": role, "content": [text], **(extra or {})})
        return
    last["content"].append(text)
    for name, value in (extra or {}).items():
        last.setdefault(name, []).extend(value)


def _joined(message: Message) -> Message:
    """Return the message with its texts joined into strings."""
    joined = {**message, "content": _JOINT.join(filter(None, message["content"]))}
    if "reasoning_content" in joined:
        joined["reasoning_content"] = "".join(joined["reasoning_content"])
    return joined


def _blocks(content: Any, path: str, kinds: tuple[str, ...], problems: Problems) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the blocks of these types, each with its path."""
    if not isinstance(content, list):
        problems.must(path, "be a string or a list of blocks", shown(content))
        return []
    found = []
    for number, block in enumerate(content):
        where = f"{path}[{number}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind in kinds:
            found.append((where, block))
        else:
            problems.must(f"{where}.type", f"be one of {', '.join(kinds)}", named(kind), ErrorCode.UNSUPPORTED)
    return found


def _text(block: Mapping[str, Any], path: str, problems: Problems) -> str:
    problems.unknown_fields(path, block, _TEXT_FIELDS)
    return _string(block, "text", path, problems)


def _result(block: Mapping[str, Any], path: str, problems: Problems) -> Message:
    problems.unknown_fields(path, block, _RESULT_FIELDS)
    content = block.get("content")
    text = text_of("" if content is None else content, f"{path}.content", problems)
    if block.get("is_error"):
        text = f"Error: {text}"  # a chat template shows only the text of a result
    return {"role": "tool", "tool_call_id": _string(block, "tool_use_id", path, problems), "content": [text]}


def _call(block: Mapping[str, Any], path: str, problems: Problems) -> Message:
    problems.unknown_fields(path, block, _USE_FIELDS)
    given = block.get("input")
    if not isinstance(given, Mapping):
        problems.must(f"{path}.input", "be a map", shown(given))
    function = {"name": _string(block, "name", path, problems), "arguments": msgspec.json.encode(given).decode()}
    return {"id": _string(block, "id", path, problems), "type": "function", "function": function}


def _string(block: Mapping[str, Any], name: str, path: str, problems: Problems) -> str:
    value = block.get(name)
    if isinstance(value, str):
        return value
    problems.must(f"{path}.{name}", "be a string", shown(value))
    return ""
