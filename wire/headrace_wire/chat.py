"""Chat messages and the options for rendering them. The template is always the model's own."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from headrace_wire.rules import (
    Anything,
    Boolean,
    Data,
    Fields,
    ListOf,
    OneOf,
    Pattern,
    Rule,
    Schema,
    Text,
    size_problem,
)
from headrace_wire.values import data_problem, is_unicode, named, shown

MAX_TEXT_BYTES: Final = 4 * 2**20
"""Limit for a prompt, or for all texts of a chat together, in bytes of UTF-8."""
MAX_MESSAGES: Final = 4096
MAX_NAME_CHARS: Final = 200
MAX_TOOLS: Final = 1024
_TEXT_PARTS: Final = ("text", "input_text", "output_text")

NAME: Final = Pattern(
    rf"[^\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]{{1,{MAX_NAME_CHARS}}}",
    f"a printable string of 1 to {MAX_NAME_CHARS} characters",
)
"""A short name, such as that of a model, a tenant or a tool. It has no control and no invisible characters."""


@dataclass(frozen=True, slots=True)
class _Content(Rule):
    """A string, or a list of texts. A text is a string or a map of type and text."""

    def problem(self, path: str, value: Any) -> str | None:
        if isinstance(value, str):
            return None
        if not isinstance(value, (list, tuple)):
            return f"{path} must be a string or a list of text parts, got {shown(value)}"
        for position, part in enumerate(value):
            place, text = f"{path}[{position}]", part
            if isinstance(part, Mapping):
                if (kind := part.get("type", "text")) not in _TEXT_PARTS:
                    return f"{place}.type must be text, the only supported type, got {named(kind)}"
                place, text = f"{place}.text", part.get("text")
            if not isinstance(text, str):
                return f"{place} must be a string, got {shown(text)}"
        return None

    @property
    def schema(self) -> Schema:
        part = {"type": "object", "properties": {"type": {"enum": [*_TEXT_PARTS]}, "text": {"type": "string"}}}
        parts = {"type": "array", "items": {"anyOf": [{"type": "string"}, part | {"required": ["text"]}]}}
        return {"anyOf": [{"type": "string"}, parts]}


@dataclass(frozen=True, slots=True)
class _Arguments(Rule):
    """The arguments of a call: a map, or its JSON."""

    def problem(self, path: str, value: Any) -> str | None:
        fits = isinstance(value, (str, Mapping))
        return None if fits else f"{path} must be a string or a map, got {shown(value)}"

    @property
    def schema(self) -> Schema:
        return {"anyOf": [{"type": "string"}, {"type": "object"}]}


FUNCTION_CALL: Final = Fields(
    {
        "id": Anything(),
        "type": OneOf(("function",)),
        "index": Anything(),
        "function": Fields({"name": NAME, "arguments": _Arguments()}, required=("name",)),
    },
    required=("function",),
)
MESSAGE: Final = Fields(
    {
        "role": NAME,
        "content": _Content(),
        "name": NAME,
        "tool_calls": ListOf(FUNCTION_CALL, "calls"),
        "tool_call_id": NAME,
        "reasoning": Text(),
        "reasoning_content": Text(),
    },
    required=("role",),
)
"""A message. It needs a content, unless its role is `assistant`."""
MESSAGES: Final = ListOf(MESSAGE, "chat messages", MAX_MESSAGES, least=1)


@dataclass(frozen=True, slots=True)
class _Tools(Rule):
    """A list of functions that the template shows to the model, in any form that the template knows."""

    def problem(self, path: str, value: Any) -> str | None:
        if not isinstance(value, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in value):
            return f"{path} must be a list of maps, got {shown(value)}"
        return size_problem(path, value, "tools", MAX_TOOLS) or data_problem(path, value)

    @property
    def schema(self) -> Schema:
        return {"type": "array", "items": {"type": "object"}, "maxItems": MAX_TOOLS}


CHAT_OPTIONS: Final[Mapping[str, Rule]] = {
    "tools": _Tools(),
    "chat_template_kwargs": Data(),
    "add_generation_prompt": Boolean(),
    "continue_final_message": Boolean(),
}


def messages_problem(messages: object, path: str = "messages") -> str | None:
    """Return the first problem of the messages of a chat, or None."""
    if problem := MESSAGES.problem(path, messages):
        return problem
    assert isinstance(messages, (list, tuple))
    for position, message in enumerate(messages):
        # an assistant message that calls tools may have no content
        if message.get("content") is None and message["role"] != "assistant":
            return f"{path}[{position}].content is required"
        if calls := message.get("tool_calls"):
            problem = data_problem(f"{path}[{position}].tool_calls", calls)
            if problem:
                return problem
    return None


def options_problems(given: Mapping[str, Any]) -> list[str]:
    """Return every problem of the chat options that are given."""
    problems = [
        problem
        for name, rule in CHAT_OPTIONS.items()
        if name in given and (problem := rule.problem(name, given[name])) is not None
    ]
    if given.get("continue_final_message") is True and given.get("add_generation_prompt", True) is True:
        problems.append("add_generation_prompt must be false when continue_final_message is true")
    if "messages" not in given:
        problems += [f"{key} must be absent without messages" for key in CHAT_OPTIONS if key in given]
    return problems


def text_size_problem(path: str, text: str) -> str | None:
    """Return why a text cannot be sent, or None if it can."""
    if not is_unicode(text):
        return f"{path} must be valid Unicode text, got a lone surrogate"
    size = len(text.encode())
    return f"{path} must be at most {MAX_TEXT_BYTES} bytes of UTF-8, got {size}" if size > MAX_TEXT_BYTES else None


def texts_of(value: object) -> Iterator[str]:
    """Yield all strings in nested lists and maps. The value must have passed `data_problem`, or hold only strings."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, str):
            yield found
        elif isinstance(found, Mapping):
            waiting += [*found.keys(), *found.values()]
        elif isinstance(found, (list, tuple)):
            waiting += found


def text_of(message: Mapping[str, Any]) -> str:
    """Return a message's content as one string."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part if isinstance(part, str) else part["text"] for part in content)


def as_sent(messages: list[Any] | tuple[Any, ...]) -> list[dict[str, Any]]:
    """Return the messages as they are sent: without keys whose value is null."""
    return [{key: value for key, value in message.items() if value is not None} for message in messages]
