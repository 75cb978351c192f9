"""The task `headrace.decide` as it is sent through the queue: its request, its result, and the client's answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from headrace_broker.call_rules import given_of
from headrace_broker.errors import InvalidRequestError
from headrace_broker.results import ErrorInfo, Usage
from headrace_broker.streams.events import EndEvent
from headrace_wire import chat
from headrace_wire.questions import decide_problems

DECIDE_TASK: Final = "headrace.decide"


@dataclass(frozen=True, slots=True)
class DecideRequest:
    """Questions about one input. `parse` makes a checked one. `repr` omits everything that a user wrote."""

    input: str | list[dict[str, Any]] = field(repr=False)
    questions: list[dict[str, Any]] = field(repr=False)
    model: str | None = None
    lora: str | None = None

    @classmethod
    def parse(cls, kwargs: Mapping[str, Any]) -> Self:
        """Check the keyword arguments of the task and make a request; null counts as absent.

        Raises InvalidRequestError, which names every problem at once.
        """
        given = given_of(kwargs)
        if problems := decide_problems(given):
            raise InvalidRequestError(problems)
        about = given["input"]
        return cls(
            input=about if isinstance(about, str) else chat.as_sent(about),
            questions=[dict(question) for question in given["questions"]],
            model=given.get("model"),
            lora=given.get("lora"),
        )

    @property
    def task_name(self) -> str:
        """The name of the Celery task."""
        return DECIDE_TASK

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The input as a chat."""
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input

    def to_kwargs(self) -> dict[str, Any]:
        """Return the task's keyword arguments. `parse` converts them to an equal request."""
        given = {"input": self.input, "questions": self.questions, "model": self.model, "lora": self.lora}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True)
class DecisionResult:
    """The answers as Celery's result backend stores them; None with an `error`."""

    request_id: str
    answers: Sequence[Mapping[str, Any]] | None = field(default=None, repr=False)
    usage: Usage | None = None
    error: ErrorInfo | None = None

    def to_wire(self) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "answers": None if self.answers is None else [*self.answers],
            "usage": self.usage.to_wire() if self.usage else None,
            "error": self.error.to_wire() if self.error else None,
        }


def decision_of(request_id: str, ended: EndEvent) -> DecisionResult:
    """Read the result of an ended request from the end of its stream."""
    answers = None if ended.error is not None else ended.answers
    return DecisionResult(request_id, answers, ended.usage, ended.error)


@dataclass(frozen=True, slots=True)
class Decided:
    """The answer to `decide`: one answer for each question, in the order of the questions."""

    answers: list[dict[str, Any]] = field(repr=False)
    """In the form of OpenAI's decisions."""
    usage: Usage
    """`prompt_tokens` counts the input and each question once."""
    request_ids: list[str]
    """The message that the call became."""
