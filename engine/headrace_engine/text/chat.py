"""The messages of a chat and the options for its template.

Both are plain data, so that another process can render the chat.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from headrace_engine.errors import InvalidRequestError
from headrace_engine.plain_values import plain_list, shown
from headrace_engine.vllm_names import with_vllm_names
from headrace_wire.rules import Boolean, problems_of
from headrace_wire.values import data_problem, is_unicode, plain

ChatMessage = Mapping[str, Any]
"""A `role`, a `content` that is text or a list of text parts, `tool_calls` (assistant), `tool_call_id` (tool)."""
ContentFormat = Literal["auto", "string", "openai"]

_TEXT_PARTS = dict.fromkeys(("text", "input_text", "output_text"), "text")
_TEXT_PARTS |= {"refusal": "refusal", "thinking": "thinking"}
"""Type of a text part -> the key of its text."""
_FLAGS = dict.fromkeys(("add_generation_prompt", "continue_final_message"), Boolean())
_NOT_VARIABLES = frozenset(
    {
        "messages",
        "conversation",
        "conversations",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "return_assistant_tokens_mask",
        "return_tensors",
        "return_dict",
        "padding",
        "truncation",
        "max_length",
        "tokenizer_kwargs",
        "processor_kwargs",
    }
)
"""Names that the renderer uses for its own options."""


@with_vllm_names("ChatOptions", InvalidRequestError)
@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """The options that turn a conversation into a prompt, with vLLM's names.

    Raises:
        InvalidRequestError: one or more values are invalid. The error names all of them.
    """

    chat_template: str | None = None
    """A Jinja template. None: the template of the model."""
    chat_template_content_format: ContentFormat = "auto"
    """The form of contents for the template: string, openai (a list of parts), or auto: a list if it loops over it."""
    add_generation_prompt: bool = True
    """End the prompt with the start of the assistant's turn."""
    continue_final_message: bool = False
    """End the prompt with the text of the last message, which the output continues."""
    tools: list[dict[str, Any]] | None = None
    """Descriptions of functions for the template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Additional variables of the template."""

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, plain_list(getattr(self, field.name)))
        problems = problems_of(_FLAGS, {name: getattr(self, name) for name in _FLAGS})
        if self.continue_final_message is True and self.add_generation_prompt is True:
            problems.append(
                "continue_final_message and add_generation_prompt exclude each other: set add_generation_prompt=False"
            )
        template: object = self.chat_template
        if template is not None and not (isinstance(template, str) and template and is_unicode(template)):
            problems.append(f"chat_template must be the text of a template, got {shown(template)}")
        if self.chat_template_content_format not in ("auto", "string", "openai"):
            problems.append(
                "chat_template_content_format must be one of auto, string, openai, "
                f"got {shown(self.chat_template_content_format)}"
            )
        problems += self._tool_problems()
        problems += self._variable_problems()
        if problems:
            raise InvalidRequestError(problems)

    def _tool_problems(self) -> list[str]:
        tools: object = self.tools
        if tools is None:
            return []
        if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
            return ["tools must be a list of maps that describe functions"]
        object.__setattr__(self, "tools", plain(tools) or None)
        problem = data_problem("tools", self.tools)
        return [problem] if problem else []

    def _variable_problems(self) -> list[str]:
        given: object = self.chat_template_kwargs
        if given is None:
            return []
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            return ["chat_template_kwargs must be a map from names to values"]
        object.__setattr__(self, "chat_template_kwargs", plain(given))
        problem = data_problem("chat_template_kwargs", self.chat_template_kwargs)
        problems = [
            f"chat_template_kwargs holds {name}, which is no variable" for name in given if name in _NOT_VARIABLES
        ]
        return [*problems, problem] if problem else problems

    @classmethod
    def from_optional(cls, **options: Any) -> "ChatOptions":
        """Build from options. None means the default."""
        return cls(**{name: value for name, value in options.items() if value is not None})

    def to_wire(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """Validate messages and convert them for a template: plain data, with the arguments of tool calls as maps.

    Raises:
        InvalidRequestError: one or more messages are invalid. The error names all of them.
    """
    if isinstance(messages, Mapping):
        raise InvalidRequestError("messages must be a list of messages, got one map: put it into a list")
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes | bytearray) or not messages:
        raise InvalidRequestError("messages must be a list with at least one message")
    problems: list[str] = []
    conversation = []
    for number, message in enumerate(messages):
        try:
            conversation.append(_read_message(f"message {number}", message))
        except InvalidRequestError as error:
            problems += error.problems
    if problems:
        raise InvalidRequestError(problems)
    return conversation


def _read_message(name: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"{name} must be a map with the texts role and content")
    read: dict[str, Any] = plain({key: value for key, value in message.items() if value is not None})
    problem = data_problem(name, read)
    if problem:
        raise InvalidRequestError(problem)
    read["content"] = _read_content(name, read)
    reasoning = read.get("reasoning_content", read.get("reasoning"))
    if reasoning is not None:  # a template may read either name
        read |= {"reasoning": reasoning, "reasoning_content": reasoning}
    calls = read.pop("tool_calls", None)
    if calls:
        read["tool_calls"] = _read_tool_calls(name, calls)
    return read


def _read_content(name: str, message: Mapping[str, Any]) -> str | list[dict[str, Any]]:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message["role"] == "assistant":
        return ""  # the message has tool calls, or the output continues it
    if not isinstance(content, list):
        raise InvalidRequestError(f"{name} must be a map with the texts role and content")
    parts = [_read_part(f"part {number} of {name}", part) for number, part in enumerate(content)]
    if message["role"] == "tool":
        return joined(parts)
    return parts


def _read_part(name: str, part: object) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        raise InvalidRequestError(f"{name} must be text, or a map with the texts type and text")
    if kind not in _TEXT_PARTS:
        raise InvalidRequestError(f"{name} is of type {shown(kind)}, but only text is supported")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise InvalidRequestError(f"{name} has no {_TEXT_PARTS[kind]}, or one that is no text")
    return {"type": "text", "text": text}


def _read_tool_calls(name: str, calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequestError(f"tool_calls of {name} must be a list of maps")
    read = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if (
            not isinstance(function, Mapping)
            or not isinstance(function.get("name"), str)
            or call.get("type", "function") != "function"
        ):
            raise InvalidRequestError(
                f"tool_calls of {name} must hold maps with a function that has a name and arguments"
            )
        arguments = _read_arguments(name, function.get("arguments"))
        read.append({"type": "function", **call, "function": {**function, "arguments": arguments}})
    return read


def _read_arguments(name: str, arguments: object) -> dict[str, Any]:
    """Return the arguments of a call as a map for a template. Malformed JSON from a model becomes an empty map."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}
        if data_problem(name, arguments):
            return {}
    return dict(arguments) if isinstance(arguments, Mapping) else {}


def joined(content: str | list[dict[str, Any]]) -> str:
    """Return a content as a single text."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
