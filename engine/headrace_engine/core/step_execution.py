"""Runs the steps that the scheduler has planned. Imports no torch.

`SequentialExecutor` waits for the results of each step. `AheadExecutor` launches the next step before it has them.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from headrace_engine.core.scheduler import Scheduler
from headrace_engine.errors import raised_at
from headrace_engine.requests.request import Request
from headrace_engine.runner.contracts import LaunchedStep, LaunchingRunner, ModelRunner, StepBatch, StepOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step with its results."""

    batch: StepBatch
    output: StepOutput
    requests: list[Request] | None = None
    """The requests of the batch, if later steps were scheduled before the results were known.

    The ids in the batch do not suffice then: a new request may have the id of one that has ended in the meantime.
    """


class StepExecutor(Protocol):
    @property
    def is_idle(self) -> bool:
        """Whether no step is in flight."""

    def execute(self, batch: StepBatch) -> Iterator[ComputedStep]:
        """Compute a batch and yield the steps whose results are known, in the order of their batches.

        The caller updates the scheduler with each step before it asks for the next one.
        """


class SequentialExecutor:
    """Computes each step before the next one is scheduled."""

    is_idle = True

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def execute(self, batch: StepBatch) -> Iterator[ComputedStep]:
        yield ComputedStep(batch, _run(batch, lambda: self._runner.execute_model(batch)))


class AheadExecutor:
    """Launches a step before the results of the previous one are known (`async_scheduling`)."""

    def __init__(self, runner: LaunchingRunner, scheduler: Scheduler) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._in_flight: _InFlight | None = None

    @property
    def is_idle(self) -> bool:
        return self._in_flight is None

    def execute(self, batch: StepBatch) -> Iterator[ComputedStep]:
        """Launch the batch and yield the previous step. Yield this step too if the next one needs its results."""
        requests = self._scheduler.expect_tokens(batch)
        previous = self._in_flight
        launched = _InFlight(batch, requests, _run(batch, lambda: self._runner.launch_model(batch)))
        self._in_flight = launched
        if previous is not None:
            yield self._finish(previous)
        if launched.step.is_complete:
            self._in_flight = None
            yield self._finish(launched)

    def _finish(self, step: "_InFlight") -> ComputedStep:
        output = _run(step.batch, step.step.result)
        if output.void_request_ids and self._in_flight is not None:
            self._in_flight.invalidate(output.void_request_ids)
        return ComputedStep(step.batch, output, step.requests)


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step on the device."""

    batch: StepBatch
    requests: list[Request]
    step: LaunchedStep

    def invalidate(self, request_ids: Iterable[str]) -> None:
        """Take back the tokens that this step counted for these requests. It will draw nothing for them."""
        void = set(request_ids)
        for request in self.requests:
            if request.request_id in void:
                request.num_computed_tokens -= 1
                request.num_pending_tokens -= 1


def _run(batch: StepBatch, compute: Callable[[], T]) -> T:
    try:
        return compute()
    except Exception as error:
        logger.error("the runner failed on a step of %s at\n%s", _describe(batch), raised_at(error))
        raise


def _describe(batch: StepBatch) -> str:
    """Describe a batch without any token, for the log of a failed step."""
    shape = ", ".join(f"{request_id}:{count}" for request_id, count in batch.num_scheduled_tokens.items())
    num_new = len(batch.new_requests)
    return f"{len(batch.num_scheduled_tokens)} requests ({num_new} new), {batch.num_tokens} tokens: {shape}"
