"""The model that this worker serves, and whether the worker takes messages now."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from headrace_engine.options.config import OWN_ENGINE
from headrace_monitoring.health import WorkerHealth
from headrace_monitoring.labels import WorkerState
from headrace_monitoring.metrics import Metrics
from headrace_workers.engine_link.adapters import Adapters
from headrace_workers.preparation.answer_formats import AnswerFormats
from headrace_workers.preparation.callback_rules import CallbackRules


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    names: Sequence[str]
    """Each name has a queue. The first name is the model's own."""
    adapters: Adapters
    max_num_seqs: int
    """Choices that the engine runs at once."""
    fetch_quantum: int
    """Choices that are taken from the queue before the engine begins a step with them."""
    max_delay_seconds: float
    """Seconds that a message's ETA may lie ahead."""
    preparation_settings: Mapping[str, Any]
    """The processes' settings, except the engine's; see `preparation.preparer.make_preparer`."""
    engine: str = OWN_ENGINE
    share_prefix_cache: bool = False
    """Let requests reuse cached prefixes of other tenants' prompts."""
    answer_formats: AnswerFormats = field(default_factory=AnswerFormats)
    """The formats in which the model writes tool calls and reasoning, for clients."""
    callback_rules: CallbackRules = field(default_factory=CallbackRules)
    """Which links of messages are served."""


logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)


@dataclass(slots=True)
class Drain:
    """Counts how the worker's requests have ended since a drain began."""

    began: float
    """Monotonic seconds."""
    running: int
    """Requests that ran when the drain began."""
    stopped: int = 0
    """Running requests that were requeued."""
    requeued: int = 0
    """Requests that were requeued before they ran."""

    def log_finished(self, still_running: int) -> None:
        """Log the counts and the duration of the drain."""
        logger.info(
            "drain finished",
            ended=max(0, self.running - self.stopped - still_running),
            requeued=self.requeued + self.stopped,
            seconds=round(time.monotonic() - self.began, 1),
        )


class ServiceState:
    """Knows whether the worker is paused or drains. `Dispatcher.resume` ends a pause; a drain ends with the process."""

    def __init__(self, metrics: Metrics, health: WorkerHealth) -> None:
        self._metrics = metrics
        self._health = health
        self.is_paused = False
        self.drain: Drain | None = None

    @property
    def is_draining(self) -> bool:
        return self.drain is not None

    @property
    def takes_messages(self) -> bool:
        """Whether messages are taken as long as the engine has room."""
        return not (self.is_paused or self.is_draining)

    def show(self, *, engine_is_ready: bool) -> None:
        """Set metrics and health; call it after each change."""
        state: WorkerState = "draining"
        if self.takes_messages:
            state = "ready" if engine_is_ready else "loading"
        self._metrics.worker_state(state)
        self._health.state(state)
