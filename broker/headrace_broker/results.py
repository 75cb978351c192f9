"""The final result of a request as Celery's result backend stores it: a public contract.

`streams/events.py` has the chunks.
"""

import builtins
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Self, TypeAlias

from headrace_broker.errors import HeadraceBrokerError, MalformedEntryError


class _Candidate(NamedTuple):
    token_id: int
    logprob: float
    rank: int
    decoded_text: str | None
    """The token's own text; empty if it ends inside a character, None if the request asked for no text."""


class TokenLogprob(_Candidate):
    """One candidate for a position: a tuple of four values, on the wire a list of four. `bytes` is sent separately.

    Args:
        bytes: the bytes that the token adds to the text. None stands for the UTF-8 of `decoded_text`, unless that is
        None.
    """

    bytes: builtins.bytes | None

    def __new__(
        cls,
        token_id: int,
        logprob: float,
        rank: int,
        decoded_text: str | None,
        bytes: builtins.bytes | None = None,  # noqa: A002  # the attribute's name
    ) -> Self:
        made = super().__new__(cls, token_id, logprob, rank, decoded_text)
        made.bytes = decoded_text.encode() if bytes is None and decoded_text is not None else bytes
        return made


TokenLogprobs: TypeAlias = list[list[TokenLogprob]]
"""One list for each generated token, the sampled token first."""
PromptLogprobs: TypeAlias = list[list[TokenLogprob] | None]
"""One list for each prompt token, the token itself first; None for the first prompt token, which has no context."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request; completion tokens are the sum over all choices."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    def to_wire(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Self:
        with _decoding("usage"):
            return cls(int(wire["prompt_tokens"]), int(wire["cached_tokens"]), int(wire["completion_tokens"]))


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """Why a request has no complete answer."""

    code: str  # an `ErrorCode`, or one that a newer worker knows
    message: str

    def to_wire(self) -> dict[str, str]:
        return {"code": self.code, "message": self.message}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Self:
        with _decoding("error"):
            return cls(str(wire["code"]), str(wire["message"]))


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """One choice. `repr` omits the generated text and tokens, so an output may appear in a log."""

    index: int
    text: str = field(repr=False)
    token_ids: list[int] = field(repr=False)
    logprobs: TokenLogprobs | None = field(default=None, repr=False)
    finish_reason: str | None = None
    stop_reason: int | str | None = field(default=None, repr=False)

    def to_wire(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "text": self.text,
            "token_ids": self.token_ids,
            "logprobs": logprobs_to_wire(self.logprobs),
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        } | logprob_bytes_to_wire("logprob_bytes", self.logprobs)

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Self:
        with _decoding("output"):
            return cls(
                index=int(wire["index"]),
                text=wire["text"],
                token_ids=list(wire["token_ids"]),
                logprobs=logprobs_from_wire(wire["logprobs"], wire.get("logprob_bytes")),
                finish_reason=wire["finish_reason"],
                stop_reason=wire["stop_reason"],
            )


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """All choices of a request. With an `error`, `outputs` may be empty or partial."""

    request_id: str
    outputs: list[ChoiceOutput]
    usage: Usage | None = None
    error: ErrorInfo | None = None
    prompt_logprobs: PromptLogprobs | None = field(default=None, repr=False)

    def to_wire(self) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "prompt_logprobs": logprobs_to_wire(self.prompt_logprobs),
            "outputs": [output.to_wire() for output in self.outputs],
            "usage": self.usage.to_wire() if self.usage else None,
            "error": self.error.to_wire() if self.error else None,
        } | logprob_bytes_to_wire("prompt_logprob_bytes", self.prompt_logprobs)

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Self:
        with _decoding("result"):
            return cls(
                request_id=str(wire["request_id"]),
                outputs=[ChoiceOutput.from_wire(output) for output in wire["outputs"]],
                usage=Usage.from_wire(wire["usage"]) if wire["usage"] is not None else None,
                error=ErrorInfo.from_wire(wire["error"]) if wire["error"] is not None else None,
                prompt_logprobs=prompt_logprobs_from_wire(
                    wire.get("prompt_logprobs"), wire.get("prompt_logprob_bytes")
                ),
            )


class RequestFailedError(HeadraceBrokerError):
    """The request did not succeed.

    `result` holds the output so far, if it is known: a `GenerateResult`, or a `PoolingResult` of a pooling task.
    """

    def __init__(self, request_id: str, code: str, message: str, *, result: Any = None) -> None:
        super().__init__(f"request {request_id} failed with {code}: {message}")
        self.request_id = request_id
        self.code = code
        self.message = message
        self.result = result


def logprobs_from_wire(
    wire: Sequence[Sequence[Sequence[Any]]] | None, wire_bytes: Sequence[Any] | None = None
) -> TokenLogprobs | None:
    if wire is None:
        return None
    return [_candidates(*position) for position in zip(wire, wire_bytes or [None] * len(wire), strict=True)]


def logprobs_to_wire(logprobs: Sequence[Sequence[TokenLogprob] | None] | None) -> list[list[list[Any]] | None] | None:
    if logprobs is None:
        return None
    return [None if entry is None else [list(candidate) for candidate in entry] for entry in logprobs]


def prompt_logprobs_from_wire(
    wire: Sequence[Sequence[Sequence[Any]] | None] | None, wire_bytes: Sequence[Any] | None = None
) -> PromptLogprobs | None:
    if wire is None:
        return None
    positions = zip(wire, wire_bytes or [None] * len(wire), strict=True)
    return [None if entry is None else _candidates(entry, own_bytes) for entry, own_bytes in positions]


def logprob_bytes_to_wire(name: str, logprobs: Sequence[Sequence[TokenLogprob] | None] | None) -> dict[str, Any]:
    """Return a map of `name` to the candidates' bytes as integers; an empty map if all are the UTF-8 of their text."""
    wire = [[_own_bytes(candidate) for candidate in position or ()] for position in logprobs or ()]
    positions = [None if all(own_bytes is None for own_bytes in position) else position for position in wire]
    return {name: positions} if any(position is not None for position in positions) else {}


def _own_bytes(candidate: TokenLogprob) -> list[int] | None:
    if candidate.bytes is None or candidate.decoded_text is None or candidate.decoded_text.encode() == candidate.bytes:
        return None
    return list(candidate.bytes)


def _candidates(wire: Sequence[Sequence[Any]], own_bytes: Sequence[Any] | None) -> list[TokenLogprob]:
    pairs = zip(wire, own_bytes or [None] * len(wire), strict=True)
    return [TokenLogprob(*[*candidate, None if data is None else bytes(data)]) for candidate, data in pairs]


@contextmanager
def _decoding(noun: str) -> Iterator[None]:
    """Convert errors of reading a map to a MalformedEntryError that names the map."""
    try:
        yield
    except MalformedEntryError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedEntryError(f"malformed {noun} on the wire: {type(error).__name__}: {error}") from error
