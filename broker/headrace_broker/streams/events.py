"""The entries of a request's stream, and their wire format.

The entry ID is `<attempt>-<tokens so far>`: the tokens of all choices and attempts, including this entry's. A pooling
request counts its inputs instead. The fields are `type` (start, chunk or end) and `data`, a msgpack map.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from headrace_broker.errors import MalformedEntryError
from headrace_broker.models.identity import ModelIdentity
from headrace_broker.packing import unpack
from headrace_broker.results import (
    ErrorInfo,
    PromptLogprobs,
    TokenLogprobs,
    Usage,
    logprobs_from_wire,
    prompt_logprobs_from_wire,
)
from headrace_wire.wire_number import wire_problem


@dataclass(frozen=True, slots=True)
class StartEvent:
    """A worker claimed the request. A second start means that the request continues after a preemption or elsewhere."""

    entry_id: str
    attempt: int
    worker: str
    traceparent: str | None = None
    """W3C trace context of the worker's span, if the worker traces."""
    abandon_after: float | None = None
    """Seconds without a subscriber heartbeat after which the request is cancelled; None if it needs no heartbeats."""
    model: ModelIdentity | None = None
    """The weights that compute this attempt's tokens; None if the worker gave none."""
    prompt_tokens: int | None = None
    """Length of the prompt in tokens; None if the worker did not give it."""
    prompt_tail: str | None = field(default=None, repr=False)
    """The end of a rendered chat, which shows whether the template has opened the model's reasoning."""
    draws: str | None = None
    """Name of the engine's random draws: equal seeds draw equal tokens under equal names. Empty if the engine cannot
    repeat a seed's draws, None if the worker gave no name."""


@dataclass(slots=True)  # not frozen, which would cost 1 us more for each chunk
class ChunkEvent:
    """New tokens of one choice; the last chunk of a choice carries its `finish_reason`."""

    entry_id: str
    attempt: int
    offset: int  # tokens of all choices up to and including this chunk
    index: int
    token_ids: list[int] = field(repr=False)
    text: str = field(repr=False)
    logprobs: TokenLogprobs | None = field(default=None, repr=False)
    finish_reason: str | None = None
    stop_reason: int | str | None = field(default=None, repr=False)
    prompt_logprobs: PromptLogprobs | None = field(default=None, repr=False)
    """In the first chunk of choice 0, if the request asked for them."""
    choice_tokens: int | None = None
    """Tokens of this choice up to and including this chunk. None if it is the only one, or from an older worker."""


@dataclass(slots=True)
class RowsEvent:
    """New rows of a pooling request, in the order of its inputs."""

    entry_id: str
    attempt: int
    first: int
    """Index of the first row's input."""
    count: int
    data: bytes = field(repr=False)
    """The rows: little-endian float32."""


@dataclass(frozen=True, slots=True)
class EndEvent:
    """The last entry of the stream. If the request did not succeed, `error` says why."""

    entry_id: str
    attempt: int
    tokens: int  # of all choices and attempts; of a pooling request, its inputs that have rows
    finish_reason: str  # a FinishReason, or one that a newer worker knows
    usage: Usage | None = None
    error: ErrorInfo | None = None
    truncated: tuple[int, ...] = ()
    """Of a pooling request: indices of the inputs that were cut."""
    labels: tuple[str, ...] = ()
    """Of a classification: names of the classes, in the order of each row."""
    answers: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    """Of a decision: the answer to each question, in the order of the questions."""


StreamEvent: TypeAlias = StartEvent | ChunkEvent | RowsEvent | EndEvent


def read_entry(entry_id: bytes, fields: Mapping[bytes, bytes]) -> StreamEvent:
    """Decode one stream entry. Raises MalformedEntryError."""
    name = entry_id.decode("ascii", "replace")
    try:
        attempt, _, offset = name.partition("-")
        return _event(name, int(attempt), int(offset), fields[b"type"], unpack(fields[b"data"]))
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise MalformedEntryError(f"malformed stream entry {name}: {type(error).__name__}: {error}") from error


def read_flat_entry(entry: Sequence[Any]) -> StreamEvent:
    """Decode an entry in the format of Redis and Lua: its ID and one list of alternating names and values."""
    entry_id, flat = entry
    parts = iter(flat)
    return read_entry(entry_id, dict(zip(parts, parts, strict=True)))


def _event(entry_id: str, attempt: int, offset: int, kind: bytes, data: dict[str, Any]) -> StreamEvent:
    if kind == b"chunk" and "bytes" in data:
        _check_types(data, first=int, count=int)
        return RowsEvent(entry_id, attempt, data["first"], data["count"], bytes(data["bytes"]))
    if kind == b"chunk":
        _check_types(data, index=int, token_ids=list, text=str)
        if data.get("choice_tokens") is not None:
            _check_types(data, choice_tokens=int)
        return ChunkEvent(
            entry_id,
            attempt,
            offset,
            data["index"],
            data["token_ids"],
            data["text"],
            logprobs_from_wire(data["logprobs"], data.get("logprob_bytes")),
            data.get("finish_reason"),
            data.get("stop_reason"),
            prompt_logprobs_from_wire(data.get("prompt_logprobs"), data.get("prompt_logprob_bytes")),
            data.get("choice_tokens"),
        )
    if kind == b"start":
        if (problem := wire_problem(data.get("wire"))) is not None:
            raise MalformedEntryError(problem)
        return StartEvent(
            entry_id,
            attempt,
            worker=data["worker"],
            traceparent=data.get("traceparent"),
            abandon_after=data.get("abandon_after"),
            model=ModelIdentity.from_wire(data),
            prompt_tokens=data.get("prompt_tokens"),
            prompt_tail=data.get("prompt_tail"),
            draws=draws if isinstance(draws := data.get("draws"), str) else None,
        )
    if kind == b"end":
        return EndEvent(
            entry_id=entry_id,
            attempt=attempt,
            tokens=offset - 1,
            finish_reason=data["finish_reason"],
            usage=Usage.from_wire(data["usage"]) if data["usage"] is not None else None,
            error=ErrorInfo.from_wire(data["error"]) if data["error"] is not None else None,
            truncated=tuple(data.get("truncated") or ()),
            labels=tuple(data.get("labels") or ()),
            answers=tuple(data.get("answers") or ()),
        )
    raise MalformedEntryError(f"unknown entry type {kind!r}")


def _check_types(data: Mapping[str, Any], **types: type) -> None:
    """Raise TypeError if a value has another type than readers calculate with."""
    for name, kind in types.items():
        if not isinstance(data[name], kind):
            raise TypeError(f"{name} must be {kind.__name__}, got {type(data[name]).__name__}")
