"""`BatchRecord`: the immutable description of a batch. `Batch`: the record with its progress."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from headrace_gateway.keys.api_key import ApiKey

ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})
OPEN: Final = ("validating", "in_progress", "finalizing", "cancelling")
_WINDOW: Final = re.compile(r"([1-9][0-9]{0,6})([smhd])")
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
LONGEST_WINDOW: Final = 7 * 86_400
SOONEST: Final = "soonest"
"""A completion window without due times: the lines wait in the order of their arrival, at most a day."""
_SOONEST_SECONDS: Final = 86_400


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A batch as it was created. Times are Unix seconds."""

    id: str
    key: str
    """Name of the API key that owns the batch. The batch keeps the rights that the key had at its creation."""
    tenant: str | None
    best_priority: int
    models: tuple[str, ...] | None
    tokens_per_day: int | None = None
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None
    output_seconds: int
    """Seconds for which its output files are kept."""
    secret: str
    """The ids of its requests are derived from it, so that nobody else can guess them."""

    @property
    def api_key(self) -> ApiKey:
        models = None if self.models is None else frozenset(self.models)
        return ApiKey(self.key, self.tenant, self.best_priority, models, tokens_per_day=self.tokens_per_day)


class Committed(msgspec.Struct, frozen=True, array_like=True):
    """The committed part of one segment: its leading bytes that are on the disk, and the lines and tokens in them."""

    output_bytes: int = 0
    error_bytes: int = 0
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def plus(self, other: "Committed") -> "Committed":
        mine, others = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return Committed(*(one + another for one, another in zip(mine, others, strict=True)))


@dataclass(slots=True)
class Batch:
    """A batch as Redis stores it."""

    record: BatchRecord
    status: str
    times: Mapping[str, int] = field(default_factory=dict)
    """Unix seconds at which the batch became `in_progress`, `finalizing` and so on."""
    total: int | None = None
    """Number of lines; None until they are checked."""
    model: str | None = None
    errors: list[dict[str, Any]] | None = None
    segments: Mapping[str, Committed] = field(default_factory=dict)
    """Segments by name, in the order of their creation."""
    output_file_id: str | None = None
    error_file_id: str | None = None
    ends_as: str = "completed"
    """Its status once its files are made."""

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    @property
    def done(self) -> Committed:
        """The sum over all segments."""
        total = Committed()
        for segment in self.segments.values():
            total = total.plus(segment)
        return total

    def expected_at(self, now: float) -> int | None:
        """Return when its last line should be answered, in Unix seconds; None if it has ended.

        Once lines are answered, the time goes by their speed. It is never after the end of the window.
        """
        if self.has_ended:
            return None
        end, begun, done = self.record.expires_at, self.times.get("in_progress"), self.done
        num_done = done.completed + done.failed
        if begun is None or not num_done or not self.total:
            return end
        seconds_of_line = max(0.0, now - begun) / num_done
        return min(end, int(now + seconds_of_line * max(0, self.total - num_done)))

    def shape(self, now: float) -> dict[str, Any]:
        """Return OpenAI's batch object, with `expected_at`. `now`: Unix seconds."""
        record, done = self.record, self.done
        names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "id": record.id,
            "object": "batch",
            "endpoint": record.endpoint,
            "errors": None if self.errors is None else {"object": "list", "data": self.errors},
            "input_file_id": record.input_file_id,
            "completion_window": record.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": record.created_at,
            "expires_at": record.expires_at,
            "expected_at": self.expected_at(now),
            **{f"{name}_at": self.times.get(name) for name in names},
            "request_counts": {"total": self.total or 0, "completed": done.completed, "failed": done.failed},
            "model": self.model,
            "usage": {
                "input_tokens": done.input_tokens,
                "input_tokens_details": {"cached_tokens": done.cached_tokens},
                "output_tokens": done.output_tokens,
                "output_tokens_details": {"reasoning_tokens": done.reasoning_tokens},
                "total_tokens": done.input_tokens + done.output_tokens,
            },
            "metadata": record.metadata,
        }


def window_seconds(text: object) -> int | None:
    """Parse a completion window such as `24h` or `soonest` into seconds; None if it is not valid."""
    if text == SOONEST:
        return _SOONEST_SECONDS
    match = _WINDOW.fullmatch(text) if isinstance(text, str) else None
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    return seconds if 0 < seconds <= LONGEST_WINDOW else None
