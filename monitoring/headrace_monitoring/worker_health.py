"""`WorkerHealth`: whether a worker is ready for work, and whether it is alive.

The worker's loop tells it what happens; the health server asks it. Not ready means "send no traffic, wait"; not
alive means "restart me", so it is said only of what a restart repairs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace_monitoring.labels import WorkerState


class WorkerHealth:
    """What the probes are answered from.

    Each attribute is written by the worker's loop alone and read by the server's thread, whole values at a time, so
    there is no lock.

    Args:
        heartbeat_timeout: seconds without `heartbeat` after which the loop counts as stuck.
        step_timeout: seconds with requests in flight and no `stepped` after which the engine counts as stuck.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        *,
        heartbeat_timeout: float = 60.0,
        step_timeout: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._heartbeat_timeout = heartbeat_timeout
        self._step_timeout = step_timeout
        self._clock = clock
        self._state: WorkerState = "loading"
        self._heartbeat_at: float | None = None
        # when the engine last had no reason to step, or stepped; None while nothing is in flight
        self._progress_at: float | None = None
        self._queue_problem: str | None = None
        self._preparation_fails = False

    def queue_blocked(self, problem: str | None) -> None:
        """Why Redis gives the worker no messages; None where it does."""
        self._queue_problem = problem

    def preparation_fails(self, fails: bool) -> None:
        """Whether a process that prepares requests does not start."""
        self._preparation_fails = fails

    def state(self, state: WorkerState) -> None:
        """The worker entered a state. While loading the engine cannot step, so its clock starts afterwards."""
        self._state = state
        if self._progress_at is not None:
            self._progress_at = self._clock()

    def heartbeat(self, in_flight: int) -> None:
        """One turn of the worker's loop, with the number of requests that the engine holds."""
        now = self._clock()
        self._heartbeat_at = now
        if in_flight == 0:
            self._progress_at = None
        elif self._progress_at is None:
            self._progress_at = now

    def stepped(self) -> None:
        """The engine made a step."""
        if self._progress_at is not None:
            self._progress_at = self._clock()

    def not_ready(self) -> str | None:
        """Why the worker takes no work, or None when it does."""
        if self._state != "ready":
            return f"the worker is {self._state}"
        if self._queue_problem is not None:
            return f"the queue cannot be served: {self._queue_problem}"
        if self._preparation_fails:
            return "requests cannot be prepared: a process for that ends at its start; its error is in the worker's log"
        return self.not_alive()

    def not_alive(self) -> str | None:
        """Why the worker should be restarted, or None when it should not.

        Before the first heartbeat it is alive: how long a start may take is for a startup probe to say.
        """
        now = self._clock()
        heartbeat_at, progress_at = self._heartbeat_at, self._progress_at
        if heartbeat_at is not None and now - heartbeat_at > self._heartbeat_timeout:
            return f"no heartbeat for {now - heartbeat_at:.0f} s (limit {self._heartbeat_timeout:g} s)"
        if self._state != "loading" and progress_at is not None and now - progress_at > self._step_timeout:
            return f"requests in flight and no step for {now - progress_at:.0f} s (limit {self._step_timeout:g} s)"
        return None
