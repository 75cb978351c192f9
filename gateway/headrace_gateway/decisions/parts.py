"""The parts of a decision's input and questions that are no plain text: JSON, and calls of custom tools."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from headrace_gateway.requests.problems import Problems
from headrace_wire.codes import ErrorCode
from headrace_wire.values import data_problem, named, shown

MAX_JSON_BYTES: Final = 256 * 1024
_ENCODE: Final = msgspec.json.Encoder().encode


def plain_items(given: Any, problems: Problems) -> Any:
    """Return the items of an input as the Responses API has them. Wrong values stay as they are."""
    if not isinstance(given, list):
        return given
    return [_plain_item(f"input[{position}]", item, problems) for position, item in enumerate(given)]


def _plain_item(path: str, item: Any, problems: Problems) -> Any:
    if not isinstance(item, Mapping):
        return item
    kind = item.get("type")
    if kind == "custom_tool_call":
        rest = {name: value for name, value in item.items() if name != "input"}
        if not isinstance(item.get("input"), str):
            problems.must(f"{path}.input", "be a string", shown(item.get("input")))
        return {**rest, "type": "function_call", "arguments": _text_of({"input": item.get("input")})}
    if kind == "custom_tool_call_output":
        item = {**item, "type": "function_call_output"}
    return {
        name: _without_json(f"{path}.{name}", value, problems) if name in ("content", "output") else value
        for name, value in item.items()
    }


def _without_json(path: str, parts: Any, problems: Problems) -> Any:
    """Return the parts with each `input_json` part as a text."""
    if not isinstance(parts, list):
        return parts
    return [
        {"type": "input_text", "text": _json_text(f"{path}[{number}]", part, problems)}
        if isinstance(part, Mapping) and part.get("type") == "input_json"
        else part
        for number, part in enumerate(parts)
    ]


def _json_text(path: str, part: Mapping[str, Any], problems: Problems) -> str:
    data = part.get("data")
    if not isinstance(data, Mapping) and not (
        isinstance(data, list) and all(isinstance(each, Mapping) for each in data)
    ):
        problems.must(f"{path}.data", "be a map or a list of maps", shown(data))
        return ""
    if problem := data_problem(f"{path}.data", data):
        problems.add(f"{path}.data", problem)
        return ""
    text = _text_of(data)
    if len(text.encode()) > MAX_JSON_BYTES:
        problems.must(f"{path}.data", f"have at most {MAX_JSON_BYTES} bytes of JSON", str(len(text.encode())))
    return text


def _text_of(data: Any) -> str:
    return _ENCODE(data).decode()


def plain_questions(given: Any, problems: Problems) -> Any:
    """Return the questions with their instructions as texts. Wrong values stay as they are."""
    if not isinstance(given, list):
        return given
    return [
        {**question, "instructions": _instructions(f"questions[{position}].instructions", parts, problems)}
        if isinstance(question, Mapping) and isinstance(parts := question.get("instructions"), list)
        else question
        for position, question in enumerate(given)
    ]


def _instructions(path: str, parts: Sequence[Any], problems: Problems) -> str:
    texts = []
    for number, part in enumerate(_without_json(path, parts, problems)):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "input_text":
            rule = "be input_text or input_json"
            problems.must(f"{path}[{number}].type", rule, named(kind), ErrorCode.UNSUPPORTED)
        elif not isinstance(part.get("text"), str):
            problems.must(f"{path}[{number}].text", "be a string", shown(part.get("text")))
        else:
            texts.append(part["text"])
    return "\n".join(texts) if len(texts) == len(parts) else "-"  # its problem is named already
