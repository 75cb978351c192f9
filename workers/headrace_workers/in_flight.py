"""`InFlight`: the requests in this worker's hands, from their claim until the end of their stream is written.

    job --where the quarantine admits it--> engine --outputs--> text, chunks --> stream --ended--> `settlement.py`

Which messages are taken from the queue is `dispatcher.py`'s business.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import redis
import structlog

from headrace_broker.connections import REDIS_ERRORS
from headrace_broker.engine_losses import EngineLosses
from headrace_broker.listeners import Listeners
from headrace_broker.reasons import DeadLetterReason, ErrorCode
from headrace_broker.results import ErrorInfo, GenerateResult
from headrace_broker.streams import Attempt, StreamWriter, WriteOutcome
from headrace_engine.capabilities import EngineCapabilities, ExactResume
from headrace_engine.core.outputs import EngineCoreOutput, EngineCoreOutputs, StepStats
from headrace_engine.errors import NOTHING_MAY_FOLLOW
from headrace_engine.input_processor import request_of_choice
from headrace_engine.output_processor import OutputProcessor
from headrace_engine.outputs import RequestOutput
from headrace_engine.request import EngineCoreRequest
from headrace_monitoring.labels import Outcome
from headrace_monitoring.metrics import Metrics
from headrace_workers.job import Job
from headrace_workers.listener_watch import ListenerWatch
from headrace_workers.publisher import Publisher
from headrace_workers.quarantine import Quarantine
from headrace_workers.settlement import CANCELLED, EXPIRED, Settlement
from headrace_workers.supervisor import EngineSupervisor
from headrace_workers.tracing import RequestTracing

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)


class InFlight:
    """Feeds the engine with jobs, publishes what it generates, and stops what is not to go on.

    Runs on the thread of Celery's event loop alone. Iterating gives the jobs in the order in which they came.

    Args:
        publish_interval: seconds between two publishings, but for the first token of a stream and the last, which never
            wait. Steps that take longer are each published.
    """

    def __init__(
        self,
        client: "redis.Redis",
        writer: StreamWriter,
        supervisor: EngineSupervisor,
        settlement: Settlement,
        metrics: Metrics,
        tracing: RequestTracing,
        publish_interval: float = 0.0,
    ) -> None:
        self._writer = writer
        self._supervisor = supervisor
        self._settlement = settlement
        self._metrics = metrics
        self._tracing = tracing
        self._publisher = Publisher(writer, metrics)
        self._jobs: dict[str, Job] = {}
        self._ending: dict[Attempt, tuple[Job, Outcome, GenerateResult]] = {}
        """Complete, but the end of the stream is not in Redis yet."""
        self._slots_used: int | None = None
        """None where it is to be counted anew: the loop asks at each of its turns, and it seldom changes."""
        self._quarantine = Quarantine(EngineLosses(client))
        self._listeners = ListenerWatch(Listeners(client))
        self._publish_interval = publish_interval
        self._published_all_at = -math.inf
        self._catch_up: Any = None
        """The timer of `_publish_overdue`."""
        self.exact_resume: ExactResume = "none"
        """Which requests the engine continues with the tokens of an undisturbed run."""
        self._draws = ""
        """Name of the engine's draws; empty where it has none that can be repeated."""
        self._exact_draws: str | None = None
        """Name of the draws with which the engine goes on exactly, behind tokens drawn with them."""
        self._followed: Counter[tuple[int, float]] = Counter()
        """A step's chunks behind earlier ones, by their tokens and the seconds between, which most have in common."""
        self._hub: Any = None

    def attach(self, hub: Any) -> None:
        """The event loop for timers; again after each reconnect."""
        self._hub = hub
        if self._catch_up is not None:  # Celery may have cancelled it
            self._catch_up.cancel()
            self._await_overdue(self._publish_interval)
        self._listeners.lost_sight()

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def get(self, request_id: str) -> Job | None:
        return self._jobs.get(request_id)

    def ending(self, request_id: str) -> Job | None:
        """The job of that request, where it is complete and only its end is not written yet."""
        return next((job for job, _, _ in self._ending.values() if job.request_id == request_id), None)

    @property
    def is_idle(self) -> bool:
        """Nothing runs, and nothing is left to write."""
        return not (self._jobs or self._ending or len(self._publisher))

    @property
    def slots_used(self) -> int:
        """Choices that are not complete."""
        if self._slots_used is None:
            self._slots_used = sum(job.num_unfinished for job in self)
        return self._slots_used

    @property
    def keeps_others_out(self) -> bool:
        """Whether nothing more is to be taken, as a suspect is to have the engine to itself."""
        return self._quarantine.keeps_others_out

    @property
    def is_isolating(self) -> bool:
        """Whether a suspect has the engine to itself."""
        return self._quarantine.alone is not None

    # -- begin and end --------------------------------------------------------------------------------------------

    def start(self, job: Job, deadline: float | None, make_room: Callable[[Job], None]) -> None:
        """A request whose stream is claimed.

        Args:
            deadline: in unix seconds.
            make_room: called before the request goes to the engine, if it does.
        """
        self._jobs[job.request_id] = job
        self._slots_used = None
        self._metrics.request_started()
        if job.attempt > 1:
            logger.info("request continues", **job.log_fields, resumed_tokens=job.num_tokens)
        job.celery_request.on_accepted(self._supervisor.pid, time.monotonic())
        if deadline is not None:
            delay = max(0.0, deadline - time.time())
            job.timers.append(self._hub.call_later(delay, partial(self._expire, job)))
        if job.num_unfinished and job.begun_with is not None:
            self._end_of_other_model(job)
        elif job.num_unfinished and self._listeners.is_abandoned(job):
            self._abandon(job)
        elif job.num_unfinished:
            self._note_other_draws(job, job.drawn_with)
            todo = self._follow(job)
            if self._quarantine.admits(job):
                make_room(job)
                self._supervisor.send(todo)
            else:
                self._go_on_with_quarantine()
        else:  # everything was generated, only the end was not written
            self._remove(job)
            self._complete_generated(job)
            self.flush()

    def end(self, job: Job, outcome: Outcome, error: ErrorInfo) -> None:
        """Stop a request before its last token; what it has is published."""
        self._publish_unshown(job, self._abort(job))
        self._complete(job, outcome, error)
        self.flush()

    def revoke(self, job: Job) -> None:
        """As `end`, for a request that Celery has revoked: its result is Celery's own."""
        self._publish_unshown(job, self._abort(job))
        self._publisher.add(job.end("cancelled", CANCELLED))
        self._settlement.finish_revoked(job)
        self.flush()

    def drop(self, job: Job) -> None:
        """Stop a request that another worker has or will have: nothing more is written."""
        self._abort(job)
        self._forget(job)

    def hand_back(self, job: Job, reason: str, *, is_counted: bool = False, is_preempted: bool = False) -> None:
        """Stop a request and put it back into the queue, from which it goes on behind its last token."""
        self._abort(job)
        self._put_back(job, reason, is_counted=is_counted, is_preempted=is_preempted)

    def _put_back(self, job: Job, reason: str, *, is_counted: bool = False, is_preempted: bool = False) -> None:
        """Put a job's message back into the queue; its stream waits there with it."""
        self._forget(job)
        if not self._publisher.is_refused:
            try:
                self._writer.keep(job.request_id)
            except REDIS_ERRORS as failure:
                logger.warning("stream may expire in the queue", **job.log_fields, error=type(failure).__name__)
        self._metrics.message_returned(reason)
        job.celery_request.hand_back(is_counted=is_counted, is_preempted=is_preempted)

    def _forget(self, job: Job) -> None:
        self._publisher.drop(job.key)
        self._tracing.end(job, None)
        self._metrics.request_handed_back()

    def _expire(self, job: Job) -> None:
        if self._jobs.get(job.request_id) is job:
            self.end(job, "expired", EXPIRED)

    def _end_all_unheard(self) -> None:
        if self._publisher.is_refused:
            self._listeners.lost_sight()
            return
        for job in self._listeners.abandoned(self._jobs.values()):
            self._abandon(job)

    def _abandon(self, job: Job) -> None:
        logger.info("nobody listens", **job.log_fields)
        self.end(job, "cancelled", ErrorInfo(ErrorCode.CANCELLED, f"nobody has listened for {job.abandon_after:g} s"))

    def _end_of_other_model(self, job: Job) -> None:
        """This worker's model must not continue the job: it would be another's answer."""
        logger.warning("model changed", **job.log_fields, begun_with=str(job.begun_with), serves=str(job.model))
        message = (
            f"the request was begun with {job.begun_with}, and this worker serves {job.model}: its tokens so far are"
            " kept, and another model must not continue them; send it again under a new id"
        )
        self.end(job, "error", ErrorInfo(ErrorCode.MODEL_CHANGED, message))

    def _remove(self, job: Job) -> None:
        del self._jobs[job.request_id]
        self._slots_used = None
        job.cancel_timers()

    def _abort(self, job: Job) -> RequestOutput | None:
        """Take a request out of engine and books; its stream and its message are the caller's.

        Returns what was not shown yet, under stream_interval or the interval of publishing.
        """
        self._remove(job)
        aborted = self._output_processor.abort(job.request_id)
        if aborted is None:
            return None
        self._supervisor.abort(aborted[1])
        return aborted[0]

    def _publish_unshown(self, job: Job, last: RequestOutput | None) -> None:
        for completion in last.outputs if last is not None else ():
            if completion.token_ids:
                completion.finish_reason = None  # the end of the stream says why
                self._publisher.add(job.take(completion, last))
                self._metrics.tokens_published(len(completion.token_ids))

    # -- the engine's life ----------------------------------------------------------------------------------------

    @cached_property
    def _output_processor(self) -> OutputProcessor:
        """The tokenizer is known when the first engine is ready."""
        return OutputProcessor(self._supervisor.tokenizer)

    def use_engine(self, capabilities: EngineCapabilities) -> None:
        """What computes the requests; before anything is started."""
        self.exact_resume = capabilities.exact_resume
        self._draws = capabilities.draws or ""
        self._exact_draws = capabilities.draws if capabilities.exact_resume == "all" else None

    def engine_lost(self, reason: str, *, was_ready: bool) -> None:
        """All requests wait for the next engine process, but for the one that is to blame."""
        if was_ready:  # one that was still loading had no request yet
            if self._output_processor.holds_back:  # what killed it lies behind the last token that it gave
                self._show()
            poison = self._quarantine.engine_lost(self._jobs.values())
            if poison is not None:
                self._bury(poison, reason)
        self.flush()

    def send_chosen(self) -> None:
        """To an engine that has no request: all, or the suspect that is to run alone."""
        for job in self._quarantine.choose(self._jobs.values()):
            self._send_again(job)

    def _send_again(self, job: Job) -> None:
        if job.num_tokens:
            self._note_other_draws(job, {self._draws})
        self._output_processor.abort(job.request_id)  # what was held back will be generated again
        self._supervisor.send(self._follow(job))

    def _note_other_draws(self, job: Job, drawn_with: set[str]) -> None:
        """Count a sampled request whose next tokens are not those that an undisturbed run would have drawn."""
        others = set() if job.request.params.is_greedy else drawn_with - {self._exact_draws}
        if others:
            self._metrics.request_resumed_across_draws()
            logger.info(
                "request goes on with other draws",
                **job.log_fields,
                begun_with=", ".join(sorted(others)),
                draws=self._draws,
            )

    def _follow(self, job: Job) -> list[EngineCoreRequest]:
        """Expect outputs of the choices that go on. Returns what the engine has to do."""
        todo = job.core_requests()
        ended = [index for index, choice in enumerate(job.choices) if choice.finish_reason is not None]
        self._output_processor.add_request(job.request, ended)
        return todo

    def _bury(self, job: Job, reason: str) -> None:
        logger.error("request kills the engine", **job.log_fields, reason=reason)
        self._supervisor.forgive()
        job.celery_request.finish_as_dead_letter(DeadLetterReason.POISON, reason)
        message = f"the engine died three times while it computed this request, at last with it alone: {reason}"
        self.end(job, "error", ErrorInfo(ErrorCode.DEAD_LETTER, message))

    def _go_on_with_quarantine(self) -> None:
        """If the suspect has ended or shown its innocence, it is the next one's turn, or all others'."""
        if not self._supervisor.is_ready:
            return
        suspect = self._quarantine.alone
        if suspect is None:
            if self._quarantine.is_time(self._jobs.values()):
                self.send_chosen()
            return
        if self._jobs.get(suspect.request_id) is suspect:
            if not self._quarantine.is_acquitted:
                return
            logger.info("request does not kill the engine", **suspect.log_fields)
            self._quarantine.acquit(suspect)
            self.hand_back(suspect, "cleared")
        self.send_chosen()

    # -- what the engine generates --------------------------------------------------------------------------------

    def publish(self, outputs: EngineCoreOutputs) -> None:
        """One step's tokens, as text, go to their streams."""
        self._note_admitted(outputs.stats)
        self._publish_due(outputs.outputs)
        self._go_on_with_quarantine()

    def _publish_due(self, outputs: Sequence[EngineCoreOutput] = ()) -> None:
        """What is new, and what was held back, as far as it is time."""
        left = self._published_all_at + self._publish_interval - time.monotonic()
        self._show(outputs, hold_back=left > 0)
        if self._output_processor.holds_back and self._catch_up is None:
            self._await_overdue(left + self._publish_interval)

    def _await_overdue(self, seconds: float) -> None:
        self._catch_up = self._hub.call_later(seconds, self._publish_overdue)

    def _show(self, outputs: Sequence[EngineCoreOutput] = (), *, hold_back: bool = False) -> None:
        started, now = time.perf_counter(), time.monotonic()
        processed = self._output_processor.process(outputs, hold_back=hold_back)
        self._supervisor.abort(processed.finished_choice_ids)
        num_tokens = 0
        for output in processed.request_outputs:
            num_tokens += self._publish(output, now)
        self._metrics.tokens_published(num_tokens)
        for (count, seconds), chunks in self._followed.items():
            self._metrics.tokens_followed(count, seconds, chunks)
        self._followed.clear()
        detokenized = time.perf_counter()
        self.flush()
        self._metrics.result_phases(detokenized - started, time.perf_counter() - detokenized)
        if not hold_back:
            self._published_all_at = now

    def _publish_overdue(self) -> None:
        """Where a step takes long, what was held back does not wait for its end, but for two intervals at most."""
        self._catch_up = None
        if self._output_processor.holds_back:
            try:
                self._publish_due()
            except Exception as error:  # noqa: BLE001  # the event loop would only log it
                self._supervisor.fail(error)

    def _note_admitted(self, stats: StepStats) -> None:
        """A request's time in the engine's queue ends where its first step began."""
        for choice in stats.admitted_choice_ids:
            job = self._jobs.get(request_of_choice(choice))
            if job is not None and job.admitted_at is None:
                job.admitted_at = max(job.received_at, time.monotonic() - stats.step_seconds)
                self._metrics.request_admitted(job.admitted_at - job.received_at, trace_id=job.trace_id)

    def _publish(self, output: RequestOutput, now: float) -> int:
        """Record what a request has got and hand it on to its stream. Returns how many tokens that is."""
        job = self._jobs[output.request_id]
        num_tokens = 0
        job.num_cached_tokens = max(job.num_cached_tokens, output.num_cached_tokens)
        for completion in output.outputs:
            if completion.finish_reason is not None:
                self._slots_used = None
            if not completion.token_ids:  # the engine refused it: there is nothing to show but the end
                job.choices[completion.index].finish_reason = completion.finish_reason
                continue
            self._publisher.add(job.take(completion, output))
            num_tokens += len(completion.token_ids)
            if job.first_token_at is None:
                job.first_token_at = now
                since = None if job.queued_at is None or job.attempt > 1 else now - job.queued_at
                prefill = None if job.admitted_at is None else now - job.admitted_at
                self._metrics.first_token(since, now - job.received_at, prefill, trace_id=job.trace_id)
                job.num_first_tokens = job.num_tokens
            choice = job.choices[completion.index]
            if choice.last_token_at is not None:
                followed = len(completion.token_ids), now - choice.last_token_at
                if job.trace_id is None:
                    self._followed[followed] += 1
                else:
                    self._metrics.tokens_followed(*followed, trace_id=job.trace_id)
            choice.last_token_at = now
        job.last_token_at = now
        if output.finished:
            self._remove(job)
            self._complete_generated(job, output.error)
        return num_tokens

    def _complete_generated(self, job: Job, error: str | None = None) -> None:
        """All choices have ended."""
        if error is not None:
            code = ErrorCode.INVALID_REQUEST if error == NOTHING_MAY_FOLLOW else ErrorCode.ENGINE_ERROR
            self._complete(job, "error", ErrorInfo(code, error))
            return
        reason = job.choices[0].finish_reason or "stop"
        self._complete(job, "length" if reason == "length" else "stop")

    def _complete(self, job: Job, outcome: Outcome, error: ErrorInfo | None = None) -> None:
        """End the job's stream; it is settled once that is written."""
        self._publisher.add(job.end(outcome, error))
        self._ending[job.key] = job, outcome, job.result(error)

    def flush(self, *, retry: bool = False) -> None:
        """Write what is to be written, settle the jobs whose end is written, and stop what its stream refuses to take.

        After a failure nothing is written until a `retry`.
        """
        refused = self._publisher.flush(retry=retry)
        if refused is None:
            return  # Redis is away: the heartbeat tries again
        ended, self._ending = self._ending, {}
        for key, (job, outcome, result) in ended.items():
            if key in refused:
                self._refused(job, refused[key])
            else:
                self._settlement.finish(job, outcome, result)
        for key, why in refused.items():
            running = self._jobs.get(key[0])
            if running is not None and running.key == key:  # an older attempt's refusal is nothing to its successor
                self._abort(running)
                self._refused(running, why)

    def _refused(self, job: Job, why: WriteOutcome) -> None:
        """The stream takes nothing more from this job."""
        logger.info("stream refused a chunk", **job.log_fields, outcome=why.value)
        if why in (WriteOutcome.FENCED, WriteOutcome.ROLLED_BACK):
            # Fenced: another worker has the request, and this lease is lost: then handing back does nothing. Or
            # somebody else wrote to the stream: then the next claim sees what is there. Rolled back: more is lost than
            # was kept here, and the next attempt generates it again. Whose doing it is cannot be told, so it counts.
            self._put_back(job, why.value, is_counted=True)
        else:
            self._settlement.finish_refused(job, is_gone=why is WriteOutcome.GONE)

    def publish_held_back(self) -> None:
        """Write what waits for the interval of publishing, so that a request that goes generates nothing twice."""
        try:
            if self._output_processor.holds_back:
                self._show()
        except Exception as error:  # noqa: BLE001  # it is not the better request's, which would be refused for it
            self._supervisor.fail(error)
        self.flush()

    def heartbeat(self) -> None:
        """Once a second: what could not be written or recorded is tried again, and nobody runs unheard."""
        self.flush(retry=True)
        self._quarantine.record(self._jobs.values())
        self._end_all_unheard()
        self._go_on_with_quarantine()
        self._supervisor.check_progress(has_work=any(job.num_unfinished for job in self))
