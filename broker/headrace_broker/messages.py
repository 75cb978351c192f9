"""The request as it is sent through the queue: a public contract. `results.py` has results, `events.py` chunks.

A client checks a request before it sends it. A worker checks it again, because other producers may not have. The engine
has its own checks of sampling parameters.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from headrace_broker import chat_rules
from headrace_broker.chat_rules import (
    CHAT_OPTIONS,
    messages_problem,
    name_problem,
    options_problems,
    size_problem,
    texts_of,
)
from headrace_broker.chat_rules import MAX_MESSAGES as MAX_MESSAGES
from headrace_broker.chat_rules import MAX_NAME_CHARS as MAX_NAME_CHARS
from headrace_broker.chat_rules import MAX_TEXT_BYTES as MAX_TEXT_BYTES
from headrace_broker.errors import InvalidRequestError
from headrace_broker.sampling_rules import as_sent, sampling_problems, token_id_problem
from headrace_broker.value_rules import plain, shown

TASK_NAME: Final = "headrace.generate"

MAX_PROMPT_TOKENS: Final = 2**20

_PROMPT_KEYS: Final = ("prompt", "prompt_token_ids", "messages")
_KEYS: Final = (*_PROMPT_KEYS, *CHAT_OPTIONS, "sampling_params", "model", "lora")
_NO_TEMPLATE: Final = "chat_template cannot be sent: chats are rendered by the model's own template"
_LORA_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request: exactly one of `prompt`, `prompt_token_ids` and `messages` is set. `parse` makes a checked one.

    `repr` omits everything that a user wrote, so a request may appear in a log.
    """

    prompt: str | None = field(default=None, repr=False)
    prompt_token_ids: list[int] | None = field(default=None, repr=False)
    messages: list[dict[str, Any]] | None = field(default=None, repr=False)
    sampling_params: dict[str, Any] = field(default_factory=dict, repr=False)
    model: str | None = None
    lora: str | None = None
    tools: list[dict[str, Any]] | None = field(default=None, repr=False)
    chat_template_kwargs: dict[str, Any] | None = field(default=None, repr=False)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @classmethod
    def parse(cls, kwargs: Mapping[str, Any]) -> Self:
        """Check the keyword arguments of the task `headrace.generate` and make a request; null counts as absent.

        Raises InvalidRequestError, which names every problem at once.
        """
        if not isinstance(kwargs, Mapping):
            raise InvalidRequestError([f"the request must be a map, not {shown(kwargs)}"])
        given = {key: plain(value) for key, value in kwargs.items() if value is not None}
        if problems := _request_problems(given):
            raise InvalidRequestError(problems)
        return cls(
            prompt=given.get("prompt"),
            prompt_token_ids=list(given["prompt_token_ids"]) if "prompt_token_ids" in given else None,
            messages=chat_rules.as_sent(given["messages"]) if "messages" in given else None,
            sampling_params=as_sent(given.get("sampling_params", {})),
            model=given.get("model"),
            lora=given.get("lora"),
            **{key: given[key] for key in CHAT_OPTIONS if key in given},
        )

    @property
    def chat_options(self) -> dict[str, Any]:
        """The options for rendering the messages into a prompt, without those that are not given."""
        return {key: value for key in CHAT_OPTIONS if (value := getattr(self, key)) is not None}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the task's keyword arguments. `parse` converts them to an equal request."""
        keys = (*_PROMPT_KEYS, *CHAT_OPTIONS, "model", "lora")
        kwargs = {key: value for key in keys if (value := getattr(self, key)) is not None}
        return kwargs | ({"sampling_params": self.sampling_params} if self.sampling_params else {})


def _request_problems(given: Mapping[str, Any]) -> list[str]:
    problems = [
        _NO_TEMPLATE if key == "chat_template" else f"unknown key {str(key)[:40]!r}"
        for key in given
        if key not in _KEYS
    ]
    prompts = [key for key in _PROMPT_KEYS if key in given]
    if len(prompts) != 1:
        found = " and ".join(prompts) or "none"
        problems.append(f"exactly one of {', '.join(_PROMPT_KEYS)} must be given, not {found}")
    if "prompt" in given:
        problems += _text_problems("prompt", given["prompt"])
    if "prompt_token_ids" in given:
        problems += _token_ids_problems(given["prompt_token_ids"])
    problems += _chat_problems(given)
    if "model" in given:
        problems += name_problems("model", given["model"])
    if "lora" in given:
        problems += lora_problems(given["lora"])
    params = given.get("sampling_params", {})
    if isinstance(params, Mapping):
        problems += sampling_problems(params)
    else:
        problems.append(f"sampling_params must be a map, not {shown(params)}")
    return problems


def _text_problems(key: str, text: object) -> list[str]:
    if not isinstance(text, str):
        return [f"{key} must be a string, not {shown(text)}"]
    problem = size_problem(key, text) if text else f"{key} must not be empty"
    return [problem] if problem else []


def _token_ids_problems(token_ids: object) -> list[str]:
    if not isinstance(token_ids, (list, tuple)):
        return [f"prompt_token_ids must be a list of token ids, not {shown(token_ids)}"]
    if not 1 <= len(token_ids) <= MAX_PROMPT_TOKENS:
        return [f"prompt_token_ids must hold 1 to {MAX_PROMPT_TOKENS} token ids, not {len(token_ids)}"]
    complaint = token_id_problem(token_ids)
    return [f"prompt_token_ids {complaint}"] if complaint else []


def _chat_problems(given: Mapping[str, Any]) -> list[str]:
    problems = options_problems(given)
    if "messages" in given and (problem := messages_problem(given["messages"])):
        problems.append(problem)
    if problems:
        return problems
    texts = [given[key] for key in ("messages", "tools", "chat_template_kwargs") if key in given]
    problem = size_problem("the text of all messages", "".join(texts_of(texts)))
    return [problem] if problem else []


def name_problems(key: str, name: object) -> list[str]:
    """Return the problem of a short name in a request, such as the name of its model or tenant, in a list."""
    problem = name_problem(key, name)
    return [problem] if problem else []


def lora_problems(name: object) -> list[str]:
    """Return the problem of a LoRA adapter's name, in a list. A path is never a valid name."""
    if isinstance(name, str) and _LORA_NAME.fullmatch(name):
        return []
    return [
        f"lora must be 1 to 128 of the characters A-Z a-z 0-9 . _ - and begin with a letter or digit, not {shown(name)}"
    ]
