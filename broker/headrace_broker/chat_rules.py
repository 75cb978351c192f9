"""Checks of chat messages and of the options for rendering them. The template is always the model's own."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from headrace_broker.value_rules import data_problem, is_unicode, shown

MAX_TEXT_BYTES: Final = 4 * 2**20
"""Limit for a prompt, or for all texts of a chat together, in bytes of UTF-8."""
MAX_MESSAGES: Final = 4096
MAX_NAME_CHARS: Final = 200
MAX_TOOLS: Final = 1024

CHAT_OPTIONS: Final = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")

_MESSAGE_KEYS: Final = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content")
_TEXT_PARTS: Final = ("text", "input_text", "output_text")
_CALL_KEYS: Final = ("id", "type", "index", "function")


def messages_problem(messages: object) -> str | None:
    """Return the first problem of the messages of a chat, or None."""
    if not isinstance(messages, (list, tuple)):
        return f"messages must be a list of chat messages, not {shown(messages)}"
    if not 1 <= len(messages) <= MAX_MESSAGES:
        return f"messages must hold 1 to {MAX_MESSAGES} chat messages, not {len(messages)}"
    for position, message in enumerate(messages):
        if problem := _message_problem(position, message):
            return problem
    return None


def _message_problem(position: int, message: object) -> str | None:
    if not isinstance(message, Mapping):
        return f"messages must hold maps of role and content, not {shown(message)} at position {position}"
    given = {key: value for key, value in message.items() if value is not None}
    if unknown := [str(key)[:40] for key in given if key not in _MESSAGE_KEYS]:
        return f"message {position} has the unknown key {unknown[0]!r}; known are {', '.join(_MESSAGE_KEYS)}"
    problem = name_problem(f"the role of message {position}", given.get("role"))
    problem = problem or _content_problem(position, given)
    for key in ("name", "tool_call_id"):
        if key in given:
            problem = problem or name_problem(f"the {key} of message {position}", given[key])
    for key in ("reasoning", "reasoning_content"):
        if not isinstance(given.get(key, ""), str):
            problem = problem or f"the {key} of message {position} must be text, not {shown(given[key])}"
    return problem or _tool_calls_problem(position, given.get("tool_calls", ()))


def _content_problem(position: int, message: Mapping[str, Any]) -> str | None:
    content = message.get("content")
    if isinstance(content, str) or (content is None and message["role"] == "assistant"):
        return None  # an assistant message that calls tools may have no content
    if not isinstance(content, (list, tuple)):
        return f"the content of message {position} must be a string or a list of text parts, not {shown(content)}"
    for number, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind not in _TEXT_PARTS:
            found = kind[:40] if isinstance(kind, str) else shown(kind)
            return f"part {number} of message {position} is of type {found!r}, but only text is supported"
        if not isinstance(part.get("text") if isinstance(part, Mapping) else part, str):
            return f"part {number} of message {position} must be text, or a map of type and text, not {shown(part)}"
    return None


def _tool_calls_problem(position: int, calls: object) -> str | None:
    if not isinstance(calls, (list, tuple)):
        return f"tool_calls of message {position} must be a list, not {shown(calls)}"
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if (
            not isinstance(function, Mapping)
            or not set(call) <= {*_CALL_KEYS}
            or call.get("type", "function") != "function"
            or not set(function) <= {"name", "arguments"}
            or name_problem("name", function.get("name"))
            or not isinstance(function.get("arguments", ""), (str, Mapping, type(None)))
        ):
            return (
                f"tool_calls of message {position} must hold maps of id, type (function) and function, "
                "a map of name and arguments"
            )
    return data_problem(f"tool_calls of message {position}", calls)


def options_problems(given: Mapping[str, Any]) -> list[str]:
    """Return every problem of the chat options that are given."""
    problems = [
        f"{key} must be true or false, not {shown(given[key])}"
        for key in ("add_generation_prompt", "continue_final_message")
        if key in given and not isinstance(given[key], bool)
    ]
    if given.get("continue_final_message") is True and given.get("add_generation_prompt", True) is True:
        problems.append("add_generation_prompt must be false when continue_final_message is true")
    tools = given.get("tools", ())
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        problems.append(f"tools must be a list of maps, not {shown(tools)}")
    elif len(tools) > MAX_TOOLS:
        problems.append(f"tools must hold at most {MAX_TOOLS} tools, not {len(tools)}")
    elif problem := data_problem("tools", tools):
        problems.append(problem)
    variables = given.get("chat_template_kwargs", {})
    if not isinstance(variables, Mapping):
        problems.append(f"chat_template_kwargs must be a map, not {shown(variables)}")
    elif problem := data_problem("chat_template_kwargs", variables):
        problems.append(problem)
    if "messages" not in given:
        problems += [f"{key} can only be given with messages" for key in CHAT_OPTIONS if key in given]
    return problems


def size_problem(key: str, text: str) -> str | None:
    """Return why a text cannot be sent, or None if it can."""
    if not is_unicode(text):
        return f"{key} must be valid Unicode text, without lone surrogates"
    size = len(text.encode())
    return f"{key} must be at most {MAX_TEXT_BYTES} bytes of UTF-8, not {size}" if size > MAX_TEXT_BYTES else None


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


def name_problem(key: str, name: object) -> str | None:
    """Return the problem of a short name, such as the name of a model, a tenant or a tool; None if it is valid."""
    if isinstance(name, str) and 1 <= len(name) <= MAX_NAME_CHARS and name.isprintable():
        return None
    return f"{key} must be a printable string of 1 to {MAX_NAME_CHARS} characters, not {shown(name)}"
