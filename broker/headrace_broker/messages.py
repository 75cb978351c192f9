"""The request as it is sent through the queue: a public contract. `results.py` has results, `streams/events.py` chunks.

A client checks a request before it sends it. A worker checks it again, because other producers may not have. The rules
are those of `headrace_wire`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from headrace_broker.call_rules import given_of
from headrace_broker.decisions import DECIDE_TASK
from headrace_broker.errors import InvalidRequestError
from headrace_broker.pooling_messages import TASK_OF
from headrace_wire import chat
from headrace_wire.chat import CHAT_OPTIONS
from headrace_wire.request import REQUEST_KEYS, request_problems
from headrace_wire.sampling import as_sent

TASK_NAME: Final = "headrace.generate"
TASK_NAMES: Final = (TASK_NAME, DECIDE_TASK, *TASK_OF)
"""The Celery tasks of all kinds of requests."""


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
        given = given_of(kwargs)
        if problems := request_problems(given):
            raise InvalidRequestError(problems)
        return cls(
            prompt=given.get("prompt"),
            prompt_token_ids=list(given["prompt_token_ids"]) if "prompt_token_ids" in given else None,
            messages=chat.as_sent(given["messages"]) if "messages" in given else None,
            sampling_params=as_sent(given.get("sampling_params", {})),
            model=given.get("model"),
            lora=given.get("lora"),
            **{key: given[key] for key in CHAT_OPTIONS if key in given},
        )

    @property
    def task_name(self) -> str:
        """The name of the Celery task."""
        return TASK_NAME

    @property
    def chat_options(self) -> dict[str, Any]:
        """The options for rendering the messages into a prompt, without those that are not given."""
        return {key: value for key in CHAT_OPTIONS if (value := getattr(self, key)) is not None}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the task's keyword arguments. `parse` converts them to an equal request."""
        kwargs = {key: value for key in REQUEST_KEYS if (value := getattr(self, key)) is not None}
        if not self.sampling_params:
            del kwargs["sampling_params"]
        return kwargs
