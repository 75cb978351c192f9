"""`InFlight`: the requests that this worker runs, from their claim until the end of their stream is written.

    job --if `isolation.py` admits it--> engine --outputs--> entries --> stream --ended--> `settlement.py`

`admission.py` decides which messages are taken from the queue.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import structlog

from headrace_broker.keys import ALL_STEPS
from headrace_broker.results import ErrorInfo
from headrace_broker.server.connections import REDIS_ERRORS
from headrace_broker.server.stream_table import MAIN
from headrace_broker.streams.listeners import Listeners
from headrace_broker.streams.writer import Attempt, WriteOutcome
from headrace_engine.api.input_processor import request_of_choice
from headrace_engine.core.outputs import EngineCoreOutputs, StepStats
from headrace_engine.errors import is_caused_by_request
from headrace_engine.options.capabilities import EngineCapabilities, ExactResume
from headrace_monitoring.metrics import Metrics, Publication
from headrace_wire.codes import DeadLetterReason, ErrorCode, FinishReason, ReturnReason
from headrace_workers.engine_link.supervisor import EngineSupervisor
from headrace_workers.requests.engine_outputs import JobOutput, OutputReader
from headrace_workers.requests.isolation import Isolation
from headrace_workers.requests.job import CoreRequest, Job, Result
from headrace_workers.requests.publisher import Publishers
from headrace_workers.requests.settlement import CANCELLED, EXPIRED, Settlement
from headrace_workers.requests.stream_homes import StreamHomes
from headrace_workers.requests.streams import ListenerWatch
from headrace_workers.requests.tracing import RequestTracing

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)

_RESERVED_SHARE: Final = 16
"""One slot in this many is reserved for requests with few choices, and at least one if the engine has two slots."""


class InFlight:
    """Sends jobs to the engine, publishes their tokens, and stops jobs before their end.

    Runs on the thread of Celery's event loop only. Iterating gives the jobs in the order of their start.

    Args:
        max_num_seqs: choices that the engine runs at once.
        publish_interval: seconds between two writes to the streams. The first and the last token of a stream never
            wait. A step that takes longer is published at its end.
    """

    def __init__(
        self,
        homes: StreamHomes,
        supervisor: EngineSupervisor,
        settlement: Settlement,
        metrics: Metrics,
        tracing: RequestTracing,
        max_num_seqs: int,
        publish_interval: float = 0.0,
    ) -> None:
        self._homes = homes
        self._supervisor = supervisor
        self._settlement = settlement
        self._metrics = metrics
        self._tracing = tracing
        self._publishers = Publishers(homes, metrics)
        self._max_num_seqs = max_num_seqs
        self._num_reserved = min(max(1, max_num_seqs // _RESERVED_SHARE), max_num_seqs - 1)
        """Number of reserved slots. A request with more choices is large, and leaves these slots to others."""
        self._jobs: dict[str, Job] = {}
        self._ending: dict[Attempt, tuple[Job, FinishReason, Result]] = {}
        """Complete jobs whose end of the stream is not in Redis yet."""
        self._slots_used: int | None = None
        self._split_below: int | None = None
        """Caches; None: count again. The event loop reads the numbers in each turn, and they seldom change."""
        self._next_step: dict[str, int] = {}
        """Request id -> number of its choices that the engine got while it computed a step."""
        self._num_ended = 0
        """Number of choices that ended with the engine's last step."""
        self.isolation = Isolation(homes)
        self._listeners = ListenerWatch(Listeners(homes.client(MAIN)))
        self._other_listeners: dict[str, ListenerWatch] = {}
        """By home on another server than the main one."""
        self._publish_interval = publish_interval
        self.num_tokens_published = 0
        """Tokens of prompts and outputs since the start of the worker, counted once they are published."""
        self._published_all_at = -math.inf
        self._overdue_timer: Any = None
        """Calls `_publish_overdue`."""
        self.exact_resume: ExactResume = "none"
        """Which requests the engine resumes with the tokens of an uninterrupted run."""
        self._outputs: OutputReader
        """Set by `use_engine`, before the first request."""
        self._draws = ""
        """Name of the engine's draws; empty if it cannot repeat them."""
        self._exact_draws: str | None = None
        """Name of the draws with which earlier tokens must have been drawn for an exact resume."""
        self._hub: Any = None

    def attach(self, hub: Any) -> None:
        """Set timers in this event loop; called again after each reconnect."""
        self._hub = hub
        if self._overdue_timer is not None:  # Celery may have cancelled it
            self._overdue_timer.cancel()
            self._await_overdue(self._publish_interval)
        for watch in (self._listeners, *self._other_listeners.values()):
            watch.redis_was_away()

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def get(self, request_id: str) -> Job | None:
        return self._jobs.get(request_id)

    def ending(self, request_id: str) -> Job | None:
        """Get the job of a request that is complete, while the end of its stream is not written yet."""
        return next((job for job, _, _ in self._ending.values() if job.request_id == request_id), None)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and nothing is left to write."""
        return not (self._jobs or self._ending or len(self._publishers))

    def _slots_changed(self) -> None:
        self._slots_used = self._split_below = None

    @property
    def slots_used(self) -> int:
        """Number of choices that the engine runs."""
        if self._slots_used is None:
            self._slots_used = sum(job.num_slots for job in self)
        return self._slots_used

    @property
    def num_for_next_step(self) -> int:
        """Number of choices that the engine got while it computed a step. They begin with its next step."""
        return sum(self._next_step.values())

    @property
    def num_ended(self) -> int:
        """Number of choices that ended with the engine's last step; 0 if the engine is idle since then."""
        return self._num_ended if self.slots_used else 0

    @property
    def num_tokens_left(self) -> int:
        """Number of tokens that the engine must compute, as far as they are known before."""
        return sum(job.num_tokens_left for job in self)

    @property
    def num_tokens_held(self) -> int:
        """Number of tokens that other workers would compute in place of this one, without new output tokens."""
        return sum(job.num_tokens_held for job in self)

    @property
    def split_below(self) -> int:
        """The step below which requests may start before all their choices have slots; `ALL_STEPS` if all may.

        One request at a time waits here for slots of its other choices. Others wait in the queue, where tenants take
        turns.
        """
        if self._split_below is None:
            self._split_below = min((job.step for job in self if job.unsent), default=ALL_STEPS)
        return self._split_below

    def has_room(self, step: int, num_choices: int) -> bool:
        """Return whether a request of this priority step may start with `num_choices` choices."""
        return num_choices <= max(1, self._max_num_seqs - self.slots_used) or step < self.split_below

    # -- begin and end --------------------------------------------------------------------------------------------

    def start(self, job: Job, deadline: float | None, make_room: Callable[[Job], None]) -> None:
        """Run a request whose stream is claimed.

        Args:
            deadline: in unix seconds.
            make_room: called right before the request goes to the engine.
        """
        self._jobs[job.request_id] = job
        self._slots_changed()
        self._metrics.request_started()
        if job.continues:
            logger.info("request continues", **job.log_fields, **{f"resumed_{job.UNIT}": job.num_done})
        job.celery_request.on_accepted(self._supervisor.pid, time.monotonic())
        if deadline is not None:
            delay = max(0.0, deadline - time.time())
            job.timers.append(self._hub.call_later(delay, partial(self._expire, job)))
        if job.num_unfinished and job.begun_with is not None:
            self._end_of_other_model(job)
        elif job.num_unfinished and self._listeners_at(job.home).is_abandoned(job):
            self._abandon(job)
        elif job.num_unfinished:
            self._note_changed_draws(job, job.drawn_with)
            todo = self._expect_outputs(job)
            if self.isolation.admits(job):
                job.unsent = []  # it needs slots for all its choices
                self._slots_changed()
                make_room(job)
                self._send(job, todo)
            else:
                self._advance_isolation()
        else:  # all tokens were generated, but the end was not written
            self._remove(job)
            self._complete_generated(job)
            self.flush()

    def end(self, job: Job, outcome: FinishReason, error: ErrorInfo) -> None:
        """Stop a request before its last token and publish the tokens that it has."""
        self._publish_unshown(job, self._abort(job))
        self._complete(job, outcome, error)
        self.flush()

    def revoke(self, job: Job) -> None:
        """Do as `end`, for a request that Celery has revoked. Celery stores its own result."""
        self._publish_unshown(job, self._abort(job))
        self._publishers.of(job.home).add(job.end("cancelled", CANCELLED))
        self._settlement.finish_revoked(job)
        self.flush()

    def drop(self, job: Job) -> None:
        """Stop a request that another worker has or will have, and write nothing more."""
        self._abort(job)
        self._forget(job)

    def requeue(self, job: Job, reason: ReturnReason, *, is_counted: bool = False, is_preempted: bool = False) -> None:
        """Stop a request and return it to the queue. It resumes after its last token."""
        self._abort(job)
        self._return_to_queue(job, reason, is_counted=is_counted, is_preempted=is_preempted)

    def _return_to_queue(
        self, job: Job, reason: ReturnReason, *, is_counted: bool = False, is_preempted: bool = False
    ) -> None:
        """Return a job's message to the queue and extend the lifetime of its stream."""
        self._forget(job)
        if not self._publishers.is_refused(job.home):
            try:
                with self._homes.writing(job.home) as writer:
                    writer.keep(job.request_id)
            except REDIS_ERRORS as failure:
                logger.warning("stream lifetime not extended", **job.log_fields, error=type(failure).__name__)
        self._metrics.message_returned(reason)
        job.celery_request.requeue(is_counted=is_counted, is_preempted=is_preempted)

    def _forget(self, job: Job) -> None:
        self._publishers.of(job.home).drop(job.key)
        self._tracing.end(job, None)
        self._metrics.request_requeued()

    def _expire(self, job: Job) -> None:
        if self._jobs.get(job.request_id) is job:
            self.end(job, "expired", EXPIRED)

    def _end_abandoned(self) -> None:
        by_home: dict[str, list[Job]] = {home: [] for home in (MAIN, *self._other_listeners)}
        for job in self:
            by_home.setdefault(job.home, []).append(job)
        for home, jobs in by_home.items():
            watch = self._listeners_at(home)
            if self._publishers.is_refused(home):
                watch.redis_was_away()
                continue
            for job in watch.abandoned(jobs):
                self._abandon(job)

    def _listeners_at(self, home: str) -> ListenerWatch:
        if home == MAIN:
            return self._listeners
        if home not in self._other_listeners:
            listeners = Listeners(self._homes.client(home), home)
            self._other_listeners[home] = ListenerWatch(listeners, when_failed=partial(self._homes.failed, home))
        return self._other_listeners[home]

    def _abandon(self, job: Job) -> None:
        logger.info("request abandoned", **job.log_fields)
        message = f"no subscriber sent a heartbeat for {job.abandon_after:g} s, the request's abandon_after"
        self.end(job, "cancelled", ErrorInfo(ErrorCode.CANCELLED, message))

    def _end_of_other_model(self, job: Job) -> None:
        """End a job whose tokens come from other weights, instead of mixing two models in one answer."""
        logger.warning("model changed", **job.log_fields, begun_with=str(job.begun_with), serves=str(job.model))
        message = (
            f"the request began with {job.begun_with}, and this worker serves {job.model}: another model must not"
            " continue its tokens, which are kept; send it again under a new id"
        )
        self.end(job, "error", ErrorInfo(ErrorCode.MODEL_CHANGED, message))

    def _remove(self, job: Job) -> None:
        del self._jobs[job.request_id]
        self._next_step.pop(job.request_id, None)
        self._slots_changed()
        job.cancel_timers()

    def _abort(self, job: Job) -> Any | None:
        """Remove a request from the engine and from this object. The caller settles its stream and its message.

        Returns output that was held back by stream_interval or by the publish interval.
        """
        self._remove(job)
        aborted = self._outputs.abort(job.request_id)
        if aborted is None:
            return None
        self._supervisor.abort(aborted[1])
        return aborted[0]

    def _publish_unshown(self, job: Job, last: Any | None) -> None:
        if last is not None:
            publication = Publication()
            self._publishers.of(job.home).add(*job.publish_unshown(last, publication))
            self._count(publication)

    # -- the engine's life ----------------------------------------------------------------------------------------

    def use_engine(self, capabilities: EngineCapabilities, outputs: OutputReader) -> None:
        """Set the engine's capabilities, and the reader of its outputs; call it before `start`."""
        self._outputs = outputs
        self.exact_resume = capabilities.exact_resume
        self._draws = capabilities.draws or ""
        self._exact_draws = capabilities.draws if capabilities.exact_resume == "all" else None

    def engine_lost(self, reason: str, *, was_ready: bool) -> None:
        """Let all requests wait for the next engine process. Fail the poison request, if it is known."""
        if was_ready:  # an engine that was still loading had no request yet
            if self._outputs.holds_back:  # the resumed request must begin at the token that killed the engine
                self._show()
            poison = self.isolation.engine_lost([job for job in self if job.num_slots])
            if poison is not None:
                self._fail_poison(poison, reason)
        self.flush()

    def send_chosen(self) -> None:
        """Send all requests, or only the suspect that must run alone, to an engine that has none."""
        for job in self:
            job.unsent = None
        self._next_step.clear()
        self._num_ended = 0
        self._slots_changed()
        for job in self.isolation.choose(self._jobs.values()):
            if job.num_done:
                self._note_changed_draws(job, {self._draws})
            self._outputs.abort(job.request_id)  # the engine generates held-back output again
            self._send(job, self._expect_outputs(job))

    def _send(self, job: Job, todo: Sequence[CoreRequest]) -> None:
        job.unsent = todo
        self._slots_changed()
        self._feed()

    def _feed(self) -> None:
        """Send choices to free slots of the engine.

        Large requests leave the reserved slots to others. Together they always get at least as many slots themselves.
        """
        for job in self:
            if job.unsent:
                room = self._max_num_seqs - self.slots_used
                if self._is_large(job):
                    missing = self._num_reserved - sum(other.num_slots for other in self if self._is_large(other))
                    room = max(0, min(room, max(room - self._num_reserved, missing)))
                room = min(room, job.num_sendable)
                todo, job.unsent = job.unsent[:room], job.unsent[room:]
                if todo and self.slots_used:
                    self._next_step[job.request_id] = self._next_step.get(job.request_id, 0) + len(todo)
                elif todo:  # the engine is idle, and begins a step now
                    self._num_ended = 0
                self._slots_changed()
                self._supervisor.send(todo)

    def _is_large(self, job: Job) -> bool:
        return job.num_choices > self._num_reserved

    def _note_changed_draws(self, job: Job, drawn_with: set[str]) -> None:
        """Count a sampled request whose next tokens differ from those of an uninterrupted run."""
        others = drawn_with - {self._exact_draws} if job.depends_on_draws else set()
        if others:
            self._metrics.request_resumed_across_draws()
            logger.info(
                "request resumed with other draws",
                **job.log_fields,
                begun_with=", ".join(sorted(others)),
                draws=self._draws,
            )

    def _expect_outputs(self, job: Job) -> Sequence[CoreRequest]:
        """Prepare for outputs of the unfinished choices. Returns the requests to send to the engine."""
        todo = job.core_requests()
        self._outputs.expect(job)
        return todo

    def _fail_poison(self, job: Job, reason: str) -> None:
        logger.error("poison request failed", **job.log_fields, reason=reason)
        self._supervisor.reset_deaths()
        job.celery_request.finish_as_dead_letter(DeadLetterReason.POISON, reason)
        message = f"the engine died three times while it computed this request, the last time with no other: {reason}"
        self.end(job, "error", ErrorInfo(ErrorCode.DEAD_LETTER, message))

    def _advance_isolation(self) -> None:
        """Once the suspect has ended or is cleared, send the next suspect, or all other requests."""
        if not self._supervisor.is_ready:
            return
        suspect = self.isolation.alone
        if suspect is None:
            if self.isolation.is_due(self._jobs.values()):
                self.send_chosen()
            return
        if self._jobs.get(suspect.request_id) is suspect:
            if not self.isolation.is_cleared:
                return
            logger.info("suspect cleared", **suspect.log_fields)
            self.isolation.clear(suspect)
            self.requeue(suspect, "cleared")
        self.send_chosen()

    # -- outputs of the engine ------------------------------------------------------------------------------------

    def publish(self, outputs: EngineCoreOutputs) -> None:
        """Write the output of one step to the streams. The engine begins the next step meanwhile."""
        self._next_step.clear()
        self._note_admitted(outputs.stats)
        before = self.slots_used
        self._publish_due(outputs)
        self._num_ended = before - self.slots_used
        self._feed()
        self._advance_isolation()

    def _publish_due(self, outputs: EngineCoreOutputs | None = None) -> None:
        """Publish new and held-back output, or hold it back until the publish interval is over."""
        left = self._published_all_at + self._publish_interval - time.monotonic()
        self._show(outputs, hold_back=left > 0)
        if self._outputs.holds_back and self._overdue_timer is None:
            self._await_overdue(left + self._publish_interval)

    def _await_overdue(self, seconds: float) -> None:
        self._overdue_timer = self._hub.call_later(seconds, self._publish_overdue)

    def _show(self, outputs: EngineCoreOutputs | None = None, *, hold_back: bool = False) -> None:
        started, now = time.perf_counter(), time.monotonic()
        read = self._outputs.read(outputs, hold_back=hold_back)
        self._supervisor.abort(read.finished_choice_ids)
        publication = Publication()
        for output in read.outputs:
            self._publish(output, now, publication)
        detokenized = time.perf_counter()
        self.flush()
        publication.detokenize_seconds = detokenized - started
        publication.publish_seconds = time.perf_counter() - detokenized
        self._count(publication)
        if not hold_back:
            self._published_all_at = now

    def _count(self, publication: Publication) -> None:
        self._metrics.published(publication)
        self.num_tokens_published += publication.num_tokens + publication.num_prompt_tokens

    def _publish_overdue(self) -> None:
        """Publish held-back output during a long step, so that it waits for two intervals at most."""
        self._overdue_timer = None
        if self._outputs.holds_back:
            try:
                self._publish_due()
            except Exception as error:  # noqa: BLE001  # the event loop would only log it
                self._supervisor.fail(error)

    def _note_admitted(self, stats: StepStats) -> None:
        """Record how long each request waited in the engine's queue, until its first step began."""
        for choice in stats.admitted_choice_ids:
            job = self._jobs.get(request_of_choice(choice))
            if job is not None and job.admitted_at is None:
                job.admitted_at = max(job.received_at, time.monotonic() - stats.step_seconds)
                self._metrics.request_admitted(job.admitted_at - job.received_at, trace_id=job.trace_id)

    def _publish(self, output: JobOutput, now: float, publication: Publication) -> None:
        """Record a request's new output and add it to its stream."""
        job = self._jobs[output.request_id]
        had_token = job.first_token_at is not None
        self._publishers.of(job.home).add(*job.publish(output.output, now, publication))
        if job.first_token_at is not None and not had_token:
            since = None if job.queued_at is None or job.continues else now - job.queued_at
            prefill = None if job.admitted_at is None else now - job.admitted_at
            self._metrics.first_token(since, now - job.received_at, prefill, trace_id=job.trace_id)
        if job.num_choices > 1:  # one of them may have ended
            self._slots_changed()
        if output.finished:
            self._remove(job)
            self._complete_generated(job, output.error)

    def _complete_generated(self, job: Job, error: str | None = None) -> None:
        """End a job whose output is complete."""
        if error is not None:
            code = ErrorCode.INVALID_REQUEST if is_caused_by_request(error) else ErrorCode.ENGINE_ERROR
            self._complete(job, "error", ErrorInfo(code, error))
            return
        self._complete(job, job.finish_reason)

    def _complete(self, job: Job, outcome: FinishReason, error: ErrorInfo | None = None) -> None:
        """End the job's stream. The job is settled once Redis has that end."""
        self._publishers.of(job.home).add(job.end(outcome, error))
        self._ending[job.key] = job, outcome, job.result(error)

    def flush(self, *, retry: bool = False) -> None:
        """Write pending entries, settle jobs whose end is written, and stop jobs whose stream refuses an entry.

        After a failure of a server nothing is written to it until a call with `retry`.
        """
        flushed = self._publishers.flush(retry=retry)
        if MAIN in flushed.behind:  # the heartbeat tries again
            self._settlement.on_refused(self._publishers.refusal or "")
        ended, self._ending = self._ending, {}
        for key, (job, outcome, result) in ended.items():
            if key in flushed.refused:
                self._refused(job, flushed.refused[key])
            elif key in flushed.unwritten:
                self._ending[key] = job, outcome, result
            else:
                self._settlement.finish(job, outcome, result)
        for key, why in flushed.refused.items():
            running = self._jobs.get(key[0])
            if running is not None and running.key == key:  # ignore refused entries of an older attempt
                self._abort(running)
                self._refused(running, why)

    def _refused(self, job: Job, why: WriteOutcome) -> None:
        """Settle a job whose stream refused an entry."""
        logger.info("stream refused a chunk", **job.log_fields, outcome=why.value)
        reason: ReturnReason = "fenced" if why is WriteOutcome.FENCED else "rolled_back"
        if why in (WriteOutcome.FENCED, WriteOutcome.ROLLED_BACK):
            # Fenced: another worker has the request and this lease is lost, so requeueing does nothing. Or another
            # client wrote to the stream: the next claim sees its entries. Rolled back: Redis lost more than this
            # worker keeps, and the next attempt generates it again. The delivery counts: the request may be the cause.
            self._return_to_queue(job, reason, is_counted=True)
        else:
            self._settlement.finish_refused(job, is_gone=why is WriteOutcome.GONE)

    def _return_of(self, home: str) -> None:
        """Return the requests of a stream server to the queue.

        Too many of their entries wait for it, or it has lost their streams: then the next worker ends them.
        """
        jobs = [job for job in self if job.home == home]
        ended = [job for job, _, _ in self._ending.values() if job.home == home]
        self._publishers.of(home).drop_all()
        if not jobs and not ended:
            return
        logger.warning("requests of a stream server returned", stream_server=home, requests=len(jobs) + len(ended))
        for job in ended:
            del self._ending[job.key]
            self._return_to_queue(job, "redis")
        for job in reversed(jobs):  # each goes to the front, so the last one goes first
            self.requeue(job, "redis")

    def publish_held_back(self) -> None:
        """Write held-back output, so that a preempted request does not generate it twice."""
        try:
            if self._outputs.holds_back:
                self._show()
        except Exception as error:  # noqa: BLE001  # raised here, it would refuse the request that needs room
            self._supervisor.fail(error)
        self.flush()

    def heartbeat(self) -> None:
        """Retry failed writes and records, and end abandoned requests. Call it once a second."""
        for home in self._homes.newly_lost():
            self._return_of(home)
        self.flush(retry=True)
        for home in self._publishers.overfull():
            self._return_of(home)
        self.isolation.record(self._jobs.values())
        self._end_abandoned()
        self._feed()
        self._advance_isolation()
        self._supervisor.check_progress(has_work=any(job.num_unfinished for job in self))
