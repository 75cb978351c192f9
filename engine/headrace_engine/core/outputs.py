"""The output of a step: the new tokens of each choice or the rows of each message, and the statistics. Plain data."""

from dataclasses import dataclass, field, fields
from typing import Any, Final

from headrace_engine.requests.request import FinishReason
from headrace_engine.runner.contracts import TokenLogprobs


@dataclass(slots=True)  # not kw_only: keyword arguments double the cost, and each token creates one
class EngineCoreOutput:
    """The new tokens of one choice, and why it ended if it did."""

    request_id: str
    new_token_ids: list[int]
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities of the prompt tokens from the second on. Only in the first output, if requested."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token that ended the choice, or `repetition_detected`."""
    error: str | None = None


@dataclass(slots=True)  # not kw_only: the wire has only the values, in this order
class PooledRows:
    """The rows of a `PoolingCoreRequest` that a step has computed, in the order of its inputs."""

    request_id: str
    first: int
    """Index of the first row's input in the message."""
    count: int
    data: bytes = field(repr=False)
    """Little-endian float32: `count` rows of equal length, each finite."""
    is_last: bool = False
    """Whether the message has no inputs after these."""
    error: str | None = None
    """Why the message ended without its other rows."""


@dataclass(slots=True)  # not kw_only: the wire has only the values, in this order
class StepStats:
    """Statistics of one step: the state of the scheduler after it, and counts and times of events in it."""

    step_seconds: float = 0.0
    kind: str = "decode"
    """prefill, decode or mixed."""
    num_tokens: int = 0
    num_requests: int = 0
    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    """Free blocks that still hold reusable content."""
    kv_blocks_free: int = 0
    kv_blocks_total: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    lora_requests: dict[str, list[int]] = field(default_factory=dict)
    """Name of an adapter -> [number of running requests, number of waiting requests]."""
    drafted_per_position: list[int] = field(default_factory=list)
    """Verified draft tokens, by position in the draft. Empty if no request had a draft."""
    accepted_per_position: list[int] = field(default_factory=list)
    """Accepted draft tokens, by position in the draft."""
    phase_seconds: dict[str, float] = field(default_factory=dict)
    num_padded_tokens: int = 0
    """Tokens computed only to fill a static shape. Not included in num_tokens."""
    compiled_graphs: int = 0
    fallback_operators: int = 0
    """Operators that ran on the CPU instead of the device."""
    warm_up_seconds: float = 0.0
    admitted_choice_ids: list[str] = field(default_factory=list)
    """Choices that were scheduled for the first time."""


STEP_STATS: Final = tuple(field.name for field in fields(StepStats))
"""The names of the fields, in the order of the wire. `to_wire` does not use asdict, which would copy all contents."""


@dataclass(slots=True, kw_only=True)
class EngineCoreOutputs:
    outputs: list[EngineCoreOutput]
    stats: StepStats
    rows: list[PooledRows] = field(default_factory=list)
    """Of a pooling model only, which has no `outputs`."""

    def to_wire(self) -> list[Any]:
        return [
            [
                [
                    o.request_id,
                    o.new_token_ids,
                    o.num_cached_tokens,
                    o.logprobs,
                    o.prompt_logprobs,
                    o.finish_reason.value if o.finish_reason else None,
                    o.stop_reason,
                    o.error,
                ]
                for o in self.outputs
            ],
            [getattr(self.stats, name) for name in STEP_STATS],
            [[getattr(rows, name) for name in PooledRows.__slots__] for rows in self.rows],
        ]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> "EngineCoreOutputs":
        return cls(
            outputs=[
                EngineCoreOutput(
                    request_id,
                    token_ids,
                    num_cached,
                    logprobs,
                    prompt_logprobs,
                    FinishReason(reason) if reason else None,
                    stop_reason,
                    error,
                )
                for request_id, token_ids, num_cached, logprobs, prompt_logprobs, reason, stop_reason, error in wire[0]
            ],
            stats=StepStats(*wire[1]),
            rows=[PooledRows(*rows) for rows in wire[2]],
        )
