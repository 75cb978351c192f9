"""A call of `decide`: its message, and the answer that its stream has. No I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

from headrace_broker.client.pooling_calls import PoolingCall
from headrace_broker.client.submission import QueueOptions, Submission, SubmitRequest, submission_of
from headrace_broker.decisions import Decided, DecideRequest, decision_of
from headrace_broker.errors import InvalidRequestError, StreamExpiredError
from headrace_broker.results import RequestFailedError, Usage
from headrace_broker.streams.events import EndEvent, StreamEvent


class DecideOptions(QueueOptions, total=False):
    """Options of `decide`."""

    lora: str | None  # name of a LoRA adapter that the model's workers serve
    prefix_key: str | None  # --prefix-affinity treats inputs of one tenant with the same key as if they began alike
    cache_salt: str | None  # only requests of one tenant with the same salt share blocks of a prefix cache


_OPTIONS: Final = DecideOptions.__annotations__.keys()


@dataclass(frozen=True, slots=True)
class DecisionCall:
    """The message of one call. It has the attributes of a `PoolingCall`, which may have several messages."""

    submissions: list[Submission]

    @property
    def firsts(self) -> list[int]:
        return [0]

    def answer(self, request_ids: Sequence[str]) -> "DecisionAnswer":
        """Return the answer to fill from the stream of this request."""
        return DecisionAnswer(request_ids)


WholeCall: TypeAlias = PoolingCall | DecisionCall
"""A call whose answer is sent whole."""


def decision_call(
    given: object, questions: object, options: Mapping[str, Any], default_model: str | None
) -> DecisionCall:
    """Check a call. Raises InvalidRequestError with every problem."""
    problems = [f"unknown option {str(name)[:40]!r}" for name in options if name not in _OPTIONS]
    kwargs = {"input": given, "questions": questions, "lora": options.get("lora")}
    try:
        request = DecideRequest.parse(kwargs)
    except InvalidRequestError as error:
        problems += error.problems
        request = DecideRequest("", [])
    return checked_decision_call(request, options, problems, default_model)


def checked_decision_call(
    request: DecideRequest, options: Mapping[str, Any], problems: list[str], default_model: str | None
) -> DecisionCall:
    """Check the options of a call whose request is checked. Raises InvalidRequestError after `problems`."""
    submission = submission_of(request, cast("SubmitRequest", options), problems, default_model=default_model)
    return DecisionCall([submission])


class DecisionAnswer:
    """The answer to a call, filled from the events of its stream."""

    def __init__(self, request_ids: Sequence[str]) -> None:
        self.request_ids: Final = [*request_ids]
        self._end: EndEvent | None = None

    def add(self, request_id: str, event: StreamEvent | StreamExpiredError) -> None:
        """Take an event. Raises RequestFailedError for a message that failed, StreamExpiredError as it is."""
        if isinstance(event, StreamExpiredError):
            raise event
        if isinstance(event, EndEvent):
            self._end = event
            if event.error is not None:
                result = decision_of(request_id, event)
                raise RequestFailedError(request_id, event.error.code, event.error.message, result=result)

    def whole(self) -> Decided:
        """Return the complete answer. Call it when the stream has ended."""
        assert self._end is not None, "the stream has not ended"
        return Decided([*self._end.answers], self._end.usage or Usage(0, 0, 0), self.request_ids)
