"""The outputs of the public classes, compatible with vLLM."""

import builtins
from dataclasses import dataclass, field

from headrace_engine.requests.lora_request import LoRARequest


@dataclass(slots=True)
class Logprob:
    """One candidate for one generated position."""

    logprob: float
    rank: int | None = None
    """1 for the most likely token."""
    decoded_token: str | None = None
    """The text of the token. None if the request asked for no text.

    Empty if the token ends inside a character: the token that completes the character has the text of both.
    """
    bytes: builtins.bytes | None = None
    """The UTF-8 bytes that the token adds to a text, possibly incomplete. None if the request asked for no text."""


@dataclass(slots=True)
class RequestStateStats:
    """The times of a request. They change until it is finished.

    `arrival_time` is wall-clock time. The other times are from the monotonic clock.
    """

    num_generation_tokens: int = 0
    """Tokens of all choices."""
    arrival_time: float = 0.0
    """Unix seconds."""
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    """Start of the first step of the request; 0 before."""
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    """Seconds from `queued_ts` to the first token."""


@dataclass(slots=True)  # not kw_only, like the next class: keyword arguments double the cost
class CompletionOutput:
    """One choice. With `RequestOutputKind.DELTA`, `text`, `token_ids` and `logprobs` have only the new part."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of all tokens so far, without the tokens of an earlier attempt. None if the request
    asked for no log-probabilities."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token: the entry of the sampled token, then the most likely ones."""
    finish_reason: str | None = None
    """stop, length, repetition, abort or error. None: not finished."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended the choice. None if the model's end token did."""
    lora_request: LoRARequest | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    """None if the prompt was given as token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One entry for each prompt token, None for the first one.

    With `RequestOutputKind.DELTA` only in the first output.
    """
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestStateStats | None = None
    lora_request: LoRARequest | None = None
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    error: str | None = None
    """The reason if the finish_reason of a choice is error."""
