"""`Job`: one message that this worker holds, from its claim to its acknowledgement.

`generate_job.py` and `pooling_job.py` have the kinds of jobs. Everything else knows only this interface.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from headrace_broker.models.identity import ModelIdentity
from headrace_broker.results import ErrorInfo, Usage
from headrace_broker.streams.writer import Attempt, StreamWrite
from headrace_engine.requests.pooling_request import PoolingCoreRequest
from headrace_engine.requests.request import EngineCoreRequest
from headrace_monitoring.metrics import Publication
from headrace_wire.codes import FinishReason
from headrace_workers.preparation.celery_request import CeleryRequest

CoreRequest = EngineCoreRequest | PoolingCoreRequest


class Result(Protocol):
    """What Celery stores as the result of a task."""

    def to_wire(self) -> dict[str, Any]: ...


@dataclass(slots=True, eq=False, kw_only=True)
class Job(ABC):
    """Connects a Celery request, engine requests and a stream."""

    UNIT: ClassVar[str] = "tokens"
    """What `num_done` counts."""

    celery_request: CeleryRequest
    attempt: int
    continues: bool = False
    """Whether an earlier attempt had begun. The number does not tell: it also counts leases that began none."""
    queued_at: float | None
    """When the message became available to workers, by the monotonic clock; None if unknown."""
    home: str = ""
    """Name of the server of its stream; '' for the main server."""
    tenant: str | None = None
    abandon_after: float | None = None
    """Seconds without a subscriber heartbeat after which the request is cancelled."""
    span: Any = None
    """OpenTelemetry's span, while the request is traced; see `tracing.py`."""
    trace_id: str | None = None
    """Id of the recorded trace, used as the exemplar of the request's latencies."""
    received_at: float = field(default_factory=time.monotonic)
    admitted_at: float | None = None
    """Monotonic time at which the engine began the request's first step."""
    first_token_at: float | None = None
    """Monotonic time at which the first token was published; None for a job without tokens."""
    last_token_at: float | None = None
    model: ModelIdentity | None = None
    """The weights that this attempt computes with."""
    begun_with: ModelIdentity | None = None
    """Other weights that computed output of an earlier attempt; None if there were none."""
    drawn_with: set[str] = field(default_factory=set)
    """Names of the draws that chose the tokens of earlier attempts, if their workers reported them."""
    engine_losses: int = 0
    """Number of engine processes, on any worker, that died with this request in them."""
    step: int = 0
    """Priority step of the list that held the message."""
    preemptions: int = 0
    """How often the request was preempted."""
    unsent: Sequence[CoreRequest] | None = None
    """Engine requests that wait for a slot of the engine; None while none of the job may be sent."""
    timers: list[Any] = field(default_factory=list)

    @property
    @abstractmethod
    def request_id(self) -> str: ...

    @property
    @abstractmethod
    def num_done(self) -> int:
        """Number of tokens, or rows, of all attempts. The ids of stream entries count them."""

    @property
    @abstractmethod
    def num_choices(self) -> int:
        """Number of slots of the engine that the whole job takes."""

    @property
    @abstractmethod
    def num_unfinished(self) -> int:
        """Number of choices whose output is not complete."""

    @property
    @abstractmethod
    def num_tokens_left(self) -> int:
        """Number of tokens that the engine must compute, as far as it is known before; 0 for generations."""

    @property
    @abstractmethod
    def num_tokens_held(self) -> int:
        """Number of tokens that another worker would compute in place of this one, without new output tokens."""

    @property
    @abstractmethod
    def num_decoded_tokens(self) -> int:
        """Number of tokens after the first one that this worker published."""

    @property
    @abstractmethod
    def depends_on_draws(self) -> bool:
        """Whether random draws determine the output."""

    @property
    @abstractmethod
    def finish_reason(self) -> FinishReason:
        """Why the complete job ended."""

    @abstractmethod
    def core_requests(self) -> Sequence[CoreRequest]:
        """Make the engine requests that continue the job after its published output."""

    @abstractmethod
    def publish(self, output: Any, now: float, publication: Publication) -> list[StreamWrite]:
        """Record new output of the engine, and return the entries that publish it."""

    @abstractmethod
    def publish_unshown(self, output: Any, publication: Publication) -> list[StreamWrite]:
        """Do as `publish`, for output that was held back when the job was stopped."""

    @abstractmethod
    def end(self, finish_reason: str, error: ErrorInfo | None = None) -> StreamWrite: ...

    @abstractmethod
    def usage(self) -> Usage: ...

    @abstractmethod
    def result(self, error: ErrorInfo | None = None) -> Result: ...

    @property
    def log_fields(self) -> dict[str, Any]:
        """Fields of every log line about this request."""
        return {"request_id": self.request_id, "attempt": self.attempt}

    @property
    def key(self) -> Attempt:
        return self.request_id, self.attempt

    @property
    def decode_seconds(self) -> float | None:
        """Seconds from this worker's first to its last token."""
        if self.first_token_at is None or self.last_token_at is None:
            return None
        return self.last_token_at - self.first_token_at

    @property
    def num_slots(self) -> int:
        """Number of choices that the engine runs."""
        return 0 if self.unsent is None else self.num_unfinished - len(self.unsent)

    @property
    def num_sendable(self) -> int:
        """Number of choices that may be sent to the engine now, if it has room."""
        return len(self.unsent or ())

    def summary(self) -> dict[str, Any]:
        """Describe the request to an operator, without its contents."""
        return {**self.log_fields, self.UNIT: self.num_done, "seconds": time.monotonic() - self.received_at}

    def cancel_timers(self) -> None:
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()
