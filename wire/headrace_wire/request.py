"""The keyword arguments of a request: exactly one prompt, its sampling parameters, the model and the adapter."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from headrace_wire.chat import CHAT_OPTIONS, NAME, messages_problem, options_problems, text_size_problem, texts_of
from headrace_wire.rules import ListOf, Pattern, Rule, Schema, Text
from headrace_wire.sampling import TOKEN_ID, sampling_problems
from headrace_wire.values import named, shown

MAX_PROMPT_TOKENS: Final = 2**20
PROMPTS: Final = ("prompt", "prompt_token_ids", "messages")
TOKENS: Final = ListOf(TOKEN_ID, "token ids", MAX_PROMPT_TOKENS)
"""Token ids to turn into text."""
_NO_TEMPLATE: Final = "chat_template must be absent: chats are rendered by the model's own template"
_OF_POOLING: Final = {"input": "headrace.embed or headrace.classify"} | dict.fromkeys(
    ("query", "queries", "documents"), "headrace.score"
)
"""Keys of other tasks, and the tasks that take them."""


@dataclass(frozen=True, slots=True)
class _Prompt(Rule):
    """A text of limited size."""

    def problem(self, path: str, value: Any) -> str | None:
        return Text().problem(path, value) or text_size_problem(path, value)

    @property
    def schema(self) -> Schema:
        return Text().schema


LORA: Final = Pattern(
    "[A-Za-z0-9][A-Za-z0-9._-]{0,127}", "1 to 128 of the characters A-Z a-z 0-9 . _ - and begin with a letter or digit"
)
"""The name of a LoRA adapter. A path is never a valid one."""
FIELDS: Final[Mapping[str, Rule]] = {
    "prompt": _Prompt(),
    "prompt_token_ids": ListOf(TOKEN_ID, "token ids", MAX_PROMPT_TOKENS, least=1),
    "model": NAME,
    "lora": LORA,
}
"""The fields that have rules of their own, besides messages and their options."""
REQUEST_KEYS: Final = ("prompt", "prompt_token_ids", "messages", "sampling_params", "model", "lora", *CHAT_OPTIONS)
"""The keyword arguments of the task. Other options of a submission go into the message's headers or properties."""


def request_problems(given: Mapping[str, Any]) -> list[str]:
    """Return every problem of the keyword arguments. `given` must not contain null values."""
    problems = [_unknown(key) for key in given if key not in REQUEST_KEYS]
    prompts = [key for key in PROMPTS if key in given]
    if len(prompts) != 1:
        problems.append(f"exactly one of {', '.join(PROMPTS)} must be given, got {' and '.join(prompts) or 'none'}")
    for name, rule in FIELDS.items():
        if name in given and (problem := rule.problem(name, given[name])):
            problems.append(problem)
    problems += _chat_problems(given)
    params = given.get("sampling_params", {})
    if isinstance(params, Mapping):
        problems += sampling_problems(params)
    else:
        problems.append(f"sampling_params must be a map, got {shown(params)}")
    return problems


def _unknown(key: object) -> str:
    if key == "chat_template":
        return _NO_TEMPLATE
    task = _OF_POOLING.get(key) if isinstance(key, str) else None
    return f"unknown key {named(key)}" + (f": the task {task} takes it" if task else "")


def _chat_problems(given: Mapping[str, Any]) -> list[str]:
    problems = options_problems(given)
    if "messages" in given and (problem := messages_problem(given["messages"])):
        problems.append(problem)
    if problems:
        return problems
    texts = [given[key] for key in ("messages", "tools", "chat_template_kwargs") if key in given]
    found = text_size_problem("messages", "".join(texts_of(texts)))
    return [found] if found else []


def name_problems(path: str, name: object) -> list[str]:
    """Return a list with the problem of a short name, such as a model's or a tenant's; an empty list if it is valid."""
    problem = NAME.problem(path, name)
    return [problem] if problem else []
