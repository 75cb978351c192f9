"""What the doors hand to their callers, in vLLM's shapes."""

import builtins
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Logprob:
    """One candidate for one generated position."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    decoded_token: str | None
    """The token's own text, empty where it ends inside a character: the token that completes the character has the text
    of both. None where the request asked for no text."""
    bytes: builtins.bytes | None = None
    """What the token adds to a text behind others, UTF-8 or a part of it. None where the request asked for no text."""


@dataclass(slots=True)  # not kw_only, nor the next one: names in a call double what making one costs
class CompletionOutput:
    """One choice. With `RequestOutputKind.DELTA`, `text`, `token_ids` and `logprobs` hold only what is new."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token: the sampled token's entry first, then the most likely ones."""
    finish_reason: str | None = None
    """stop, length, repetition, abort or error; None while the choice goes on."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None for the model's own end token."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    """None when the prompt came as token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One entry a prompt token, None for the first, which nothing comes before. With `RequestOutputKind.DELTA` only in
    the first output."""
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache spared."""
    error: str | None = None
    """Why the engine gave the request up, where a choice's finish_reason is error."""
