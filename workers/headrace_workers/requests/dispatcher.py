"""`Dispatcher`: creates the parts of a worker, and starts and drains them.

    queue --> `Admission` --> `InFlight` <--> engine, seen by `EngineWatch`
                                  |
                                  +--> `Settlement`

Runs on the thread of Celery's event loop only. `LoopWatch` measures that loop.
"""

import time
from collections.abc import Callable
from dataclasses import asdict
from heapq import nsmallest
from operator import attrgetter
from typing import Any

import redis
import structlog

from headrace_broker.queue.dead_letters import DeadLetter
from headrace_broker.server.stream_servers import StreamServers
from headrace_monitoring.health import WorkerHealth
from headrace_monitoring.metrics import Metrics
from headrace_workers.engine_link.supervisor import EngineEvents, EngineSupervisor
from headrace_workers.preparation.preparer_process import MakeProcess
from headrace_workers.requests.admission import Admission
from headrace_workers.requests.engine_watch import EngineWatch
from headrace_workers.requests.in_flight import InFlight
from headrace_workers.requests.preemption import Preemption
from headrace_workers.requests.service_state import Drain, ServedModel, ServiceState
from headrace_workers.requests.settlement import Settlement, StoreResult
from headrace_workers.requests.stream_homes import StreamHomes
from headrace_workers.requests.tracing import RequestTracing

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)

HEARTBEAT_SECONDS = 1.0


class LoopWatch:
    """Measures the event loop's turns.

    During a long turn no lease is renewed, no stream is written and no probe is answered. A timer would measure only
    the turn in which it is due.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._longest = 0.0
        self._turn_began: float | None = None

    def attach(self, hub: Any) -> None:
        """Watch this event loop; called again after each reconnect, which gives it another poller."""
        if not isinstance(hub.poller, _WatchedPoller):
            hub.poller = _WatchedPoller(hub.poller, self)
        self.pause()

    def pause(self) -> None:
        """Measure nothing until the loop's next wait."""
        self._turn_began = None

    def longest_turn(self) -> float:
        """Get the seconds of the longest turn since the last call, including the current one."""
        self._end_turn()
        longest, self._longest = self._longest, 0.0
        return longest

    def poll(self, wait: Callable[[], Any]) -> Any:
        """Return what `wait` returns. The time that it takes is not part of a turn."""
        self._end_turn()
        events = wait()
        self._turn_began = self._clock()
        return events

    def _end_turn(self) -> None:
        if self._turn_began is not None:
            self._longest = max(self._longest, self._clock() - self._turn_began)


class _WatchedPoller:
    """Wraps kombu's poller and reports its waits to a `LoopWatch`."""

    def __init__(self, poller: Any, watch: LoopWatch) -> None:
        self._poller = poller
        self._watch = watch

    def poll(self, timeout: float | None) -> Any:
        return self._watch.poll(lambda: self._poller.poll(timeout))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._poller, name)


class Dispatcher:
    """Makes the parts, starts and drains them, and reports the worker's state.

    Args:
        client: Redis for the registry, and for streams that are not on another server.
        streams: the stream servers; without them, all streams are on `client`.
        supervise: makes the engine's supervisor, which reports engine events.
        make_process: makes the two processes that prepare messages.
        preemption: preempts requests for those of higher priority.
        store_result, call_back_dead: see `Settlement`.
        on_refused: called with the reason when Redis refuses to serve the queue, or refuses a write of the worker.
        on_given_up: called with the reason when the engine cannot be kept alive or used.
        publish_interval: see `InFlight`.
        tracer_provider: OpenTelemetry's; None traces nothing.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        client: "redis.Redis",
        stream_ttl_seconds: int,
        worker_name: str,
        supervise: Callable[[EngineEvents], EngineSupervisor],
        make_process: MakeProcess,
        preemption: Preemption,
        metrics: Metrics,
        health: WorkerHealth,
        store_result: StoreResult,
        on_refused: Callable[[str], None],
        on_given_up: Callable[[str], None],
        publish_interval: float = 0.0,
        tracer_provider: Any = None,
        streams: StreamServers | None = None,
        call_back_dead: Callable[[DeadLetter], None] = lambda _letter: None,
    ) -> None:
        self._model = model
        self._metrics = metrics
        self._health = health
        self._on_given_up = on_given_up
        servers = StreamServers(client, {}, stream_ttl_seconds) if streams is None else streams
        self.homes = StreamHomes(servers, stream_ttl_seconds)
        tracing = RequestTracing(tracer_provider, model.names[0])
        self._state = ServiceState(metrics, health)
        self.settlement = Settlement(self.homes, metrics, store_result, tracing, on_refused, call_back_dead)

        def run(supervisor: EngineSupervisor) -> InFlight:
            return InFlight(
                self.homes,
                supervisor,
                self.settlement,
                metrics,
                tracing,
                max_num_seqs=model.max_num_seqs,
                publish_interval=publish_interval,
            )

        self.engine = EngineWatch(
            model,
            client,
            self._state,
            metrics,
            health,
            worker_name=worker_name,
            supervise=supervise,
            run=run,
            configure=lambda settings, plain: self.admission.preparation.configure(settings, plain),
            end_worker=self._end_worker,
        )
        self._in_flight = self.engine.in_flight
        self.admission = Admission(
            model,
            self.engine,
            self._state,
            self.settlement,
            self.homes,
            metrics,
            tracing,
            make_process=make_process,
            preemption=preemption,
            worker_name=worker_name,
        )
        self._preparation = self.admission.preparation
        self.loop_watch = LoopWatch()

    def start(self) -> None:
        """Start the processes that prepare messages."""
        self._preparation.start()

    def attach(self, hub: Any) -> None:
        """Run in this event loop; called again after each reconnect, when Celery has forgotten unprepared messages."""
        self._preparation.drop_all()
        self.settlement.attach(hub)
        self._in_flight.attach(hub)
        self._preparation.attach(hub)
        self.loop_watch.attach(hub)

    @property
    def is_idle(self) -> bool:
        """Whether no message is held, nothing is left to write and nothing to acknowledge."""
        return self._in_flight.is_idle and not self._preparation and self.settlement.is_idle

    def heartbeat(self) -> None:
        """Do the periodic work; the event loop calls it once a second."""
        self.settlement.heartbeat()
        self._metrics.heartbeat()
        self.homes.refresh()
        self._health.streams_blocked(self.homes.problem)
        self._metrics.loop_lag(self.loop_watch.longest_turn())
        self._health.heartbeat(len(self._in_flight))
        self._health.preparation_blocked(self._preparation.problem)
        slots = self._model.max_num_seqs
        self._metrics.slots(min(self._in_flight.slots_used, slots), slots)
        self._in_flight.heartbeat()
        self.engine.measure_speed()
        self.admission.heartbeat()

    # -- pause and drain ------------------------------------------------------------------------------------------

    @property
    def is_draining(self) -> bool:
        return self._state.is_draining

    def pause(self) -> None:
        """Take no messages until `resume`. Running requests continue."""
        self._state.is_paused = True
        self.admission.requeue_unprepared()
        self._show_state()

    def resume(self) -> bool:
        """Undo `pause`. Returns False if the worker drains for good."""
        if self.is_draining:
            return False
        self._state.is_paused = False
        self._show_state()
        return True

    def drain(self, reason: str) -> None:
        """Take no more messages. Running requests continue."""
        if self._state.drain is None:
            running = len(self._in_flight)
            self._state.drain = Drain(began=time.monotonic(), running=running)
            logger.info("drain began", reason=reason, running=running, unprepared=len(self._preparation))
        self._state.drain.requeued += self.admission.requeue_unprepared()
        self._show_state()

    def log_drained(self) -> None:
        """Log how many requests have ended in which way since the drain began."""
        assert self._state.drain is not None
        self._state.drain.log_finished(len(self._in_flight))

    def requeue_all(self) -> None:
        """Return every incomplete request to the queue. Another worker resumes it from its stream.

        If the engine could not be kept alive, one of these requests may be the cause, so their deliveries count.
        """
        self._in_flight.flush(retry=True)
        jobs = list(self._in_flight)
        is_counted = self.engine.is_given_up
        for job in reversed(jobs):  # each goes to the front, so the last one goes first
            self._in_flight.requeue(job, "engine_given_up" if is_counted else "drain", is_counted=is_counted)
        if self._state.drain is not None:
            self._state.drain.stopped += len(jobs)

    def _end_worker(self, reason: str) -> None:
        """End a worker that cannot continue with its engine."""
        if self.engine.is_given_up:
            self.drain("engine given up")
        else:
            self.drain("engine unusable")
            self.requeue_all()
        self._on_given_up(reason)

    def stop(self) -> None:
        self.engine.stop()
        self._preparation.close()
        self.settlement.stop()

    def _show_state(self) -> None:
        self._state.show(engine_is_ready=self.engine.supervisor.is_ready)

    # -- for operators --------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return figures and states for operators."""
        return {
            "model": self._model.names[0],
            "state": self._health.not_ready() or "ready",
            "pools": self.engine.pools,
            "paused": self._state.is_paused,
            "draining": self.is_draining,
            "preparing": len(self._preparation),
            "requests": len(self._in_flight),
            "slots_used": self._in_flight.slots_used,
            "slots": self._model.max_num_seqs,
            "engine": self.engine.stats(),
            "totals": asdict(self._metrics.totals),
            "slowest_requests": [job.summary() for job in nsmallest(5, self._in_flight, key=attrgetter("received_at"))],
        }
