"""A call of `embed`, `score` or `classify`: its messages, and the answer that their streams have together. No I/O."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, cast

from headrace_broker.client.submission import QueueOptions, Submission, SubmitRequest, submission_of
from headrace_broker.errors import InvalidRequestError, StreamExpiredError
from headrace_broker.pooling_messages import Input, PoolingRequest
from headrace_broker.pooling_results import Pooled, PoolingResult, matrix_of
from headrace_broker.results import RequestFailedError, Usage
from headrace_broker.streams.events import EndEvent, RowsEvent, StreamEvent
from headrace_wire.pooling import POOLING, PoolingTask
from headrace_wire.values import is_integer, shown

Inputs: TypeAlias = str | Sequence[str] | Sequence[Sequence[int]]
PairInputs: TypeAlias = str | Sequence[str | tuple[str, str] | Sequence[str]] | Sequence[Sequence[int]]

MESSAGE_INPUTS: Final = 256
MESSAGE_TOKENS: Final = 16_384
"""A message has at most so many inputs, and so many tokens by an estimate, unless it has only one input."""
_BYTES_PER_TOKEN: Final = 4


class ScoreOptions(QueueOptions, total=False):
    """Options of `score`, `rerank` and `classify`."""

    activation: bool | None  # False returns logits
    truncate: str | None  # error, start or end: what is cut off a long input
    max_tokens: int | None  # tokens of one input; the model's maximum unless given


class EmbedOptions(QueueOptions, total=False):
    """Options of `embed`."""

    prompt_name: str | None  # the model's prompt of this name before each text
    prompt: str | None  # this text before each text
    dimensions: int | None  # cut the embeddings, of a model that was trained for it
    normalize: bool | None  # whether embeddings get the length 1; as the model's folder says unless given
    truncate: str | None  # error, start or end: what is cut off a long input
    max_tokens: int | None  # tokens of one input; the model's maximum unless given
    add_special_tokens: bool | None


_QUEUE_OPTIONS: Final = QueueOptions.__annotations__.keys()


@dataclass(frozen=True, slots=True)
class PoolingCall:
    """The messages of one call, in the order of their inputs."""

    task: PoolingTask
    submissions: list[Submission]
    firsts: list[int]
    """Index of the first input of each message."""

    def answer(self, request_ids: Sequence[str]) -> "PoolingAnswer":
        """Return the answer to fill from the streams of these requests, in the order of `submissions`."""
        parts = {request_id: _Part(first) for request_id, first in zip(request_ids, self.firsts, strict=True)}
        return PoolingAnswer(self.task, parts)


def pooling_call(
    task: PoolingTask, inputs: Mapping[str, Any], options: Mapping[str, Any], default_model: str | None
) -> PoolingCall:
    """Check a call and divide it into messages. Raises InvalidRequestError with every problem.

    With a `request_id`, the messages after the first have the ids `<request_id>.1`, `<request_id>.2` and so on.
    """
    problems: list[str] = []
    fields = POOLING[task].keys() - {"model"}  # the model selects the queue
    unknown = [name for name in options if name not in fields | _QUEUE_OPTIONS]
    given = {name: value for name, value in options.items() if name in fields}
    try:
        request = PoolingRequest.parse(task, {**inputs, **given, **dict.fromkeys(unknown, True)}, is_call=True)
    except InvalidRequestError as error:
        problems, request = list(error.problems), PoolingRequest(task, {"input": "", "query": "", "documents": ""})
    parts = [*_parts(request.inputs)]
    queue_options = {name: value for name, value in options.items() if name in _QUEUE_OPTIONS}
    submissions = [
        submission_of(
            request if len(parts) == 1 else request.part(first, stop),
            cast("SubmitRequest", _of_message(number, queue_options) if len(parts) > 1 else queue_options),
            problems,
            default_model=default_model,
        )
        for number, (first, stop) in enumerate(parts)
    ]
    return PoolingCall(task, submissions, [first for first, _ in parts])


def score_call(query: object, documents: object, options: Mapping[str, Any], default_model: str | None) -> PoolingCall:
    """Check a call of `score`. One query is for all documents, several have as many documents."""
    name = "query" if isinstance(query, str) else "queries"
    return pooling_call("score", {name: query, "documents": documents}, options, default_model)


def check_top_n(top_n: object) -> None:
    """Raise InvalidRequestError unless it is None or at least 0."""
    if top_n is not None and not (is_integer(top_n) and top_n >= 0):
        raise InvalidRequestError(f"top_n must be an integer of at least 0, or None, got {shown(top_n)}")


def _of_message(number: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of one of several messages, which need different ids and idempotency keys."""
    key, request_id = options.get("idempotency_key"), options.get("request_id")
    found = {**options, "idempotency_key": f"{key}:{number}"} if isinstance(key, str) else dict(options)
    return {**found, "request_id": f"{request_id}.{number}"} if number and request_id is not None else found


def _parts(inputs: Sequence[Input]) -> Iterator[tuple[int, int]]:
    """Yield the first input of each message and the one after its last."""
    first = tokens = 0
    for index, item in enumerate(inputs):
        more = estimated_tokens(item)
        if index > first and (index - first == MESSAGE_INPUTS or tokens + more > MESSAGE_TOKENS):
            yield first, index
            first, tokens = index, 0
        tokens += more
    yield first, len(inputs)


def estimated_tokens(item: Input) -> int:
    """Estimate the tokens of an input from its bytes; the number of its ids is exact."""
    if isinstance(item, list):
        return len(item)
    texts = [item] if isinstance(item, str) else item
    return sum(-(-len(text.encode()) // _BYTES_PER_TOKEN) for text in texts)


@dataclass(slots=True)
class _Part:
    """What the stream of one message has so far."""

    first: int
    rows: list[bytes] = field(default_factory=list)
    count: int = 0
    end: EndEvent | None = None


class PoolingAnswer:
    """The answer to a call, filled from the events of its streams."""

    def __init__(self, task: PoolingTask, parts: dict[str, _Part]) -> None:
        self._task: Final = task
        self._parts: Final = parts

    @property
    def request_ids(self) -> list[str]:
        return [*self._parts]

    def add(self, request_id: str, event: StreamEvent | StreamExpiredError) -> None:
        """Take an event. Raises RequestFailedError for a message that failed, StreamExpiredError as it is."""
        part = self._parts[request_id]
        if isinstance(event, StreamExpiredError):
            raise event
        if isinstance(event, RowsEvent):
            part.rows.append(event.data)
            part.count += event.count
        elif isinstance(event, EndEvent):
            part.end = event
            if event.error is not None:
                rows = matrix_of(self._task, part.count, b"".join(part.rows)) if part.count else None
                result = PoolingResult(request_id, rows, event.labels, event.truncated, event.usage, event.error)
                raise RequestFailedError(request_id, event.error.code, event.error.message, result=result)

    def whole(self) -> Pooled:
        """Return the complete answer. Call it when every stream has ended."""
        parts = [*self._parts.values()]
        ends = [part.end for part in parts if part.end is not None]
        assert len(ends) == len(parts), "a stream has not ended"
        usages = [end.usage for end in ends if end.usage is not None]
        return Pooled(
            matrix_of(
                self._task, sum(part.count for part in parts), b"".join(row for part in parts for row in part.rows)
            ),
            [*ends[0].labels],
            [part.first + index for part, end in zip(parts, ends, strict=True) for index in end.truncated],
            Usage(sum(usage.prompt_tokens for usage in usages), 0, 0),
            self.request_ids,
        )
