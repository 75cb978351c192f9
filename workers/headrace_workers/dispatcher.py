"""`Dispatcher`: moves requests between the queue, the engine and their streams.

    queue --accept--> claim the stream, validate, --> engine
    engine --outputs--> text, chunks --> stream; the last one --> result, acknowledgement

Runs on the thread of Celery's event loop alone. How a request ends is in `settlement.py`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from heapq import nsmallest
from typing import Any

import redis
import structlog
from celery.worker.state import task_ready, task_reserved

from headrace_broker.connections import REDIS_ERRORS
from headrace_broker.engine_losses import EngineLosses
from headrace_broker.listeners import Listeners
from headrace_broker.registry import register_model
from headrace_broker.results import ErrorInfo
from headrace_broker.streams import StreamWriter
from headrace_engine.core.outputs import EngineCoreOutputs, StepStats
from headrace_engine.input_processor import InputProcessor, request_id_of
from headrace_engine.logits_processor import load_logits_processors
from headrace_engine.output_processor import OutputProcessor
from headrace_engine.outputs import RequestOutput
from headrace_engine.runner.contracts import ModelInfo
from headrace_engine.tokenizer import ModelTokenizer
from headrace_monitoring.logging import frames
from headrace_monitoring.metrics import Metrics
from headrace_monitoring.worker_health import WorkerHealth
from headrace_workers.adapters import Adapters
from headrace_workers.intake import Incoming, Intake, RefusedError
from headrace_workers.job import Job
from headrace_workers.listener_watch import ListenerWatch
from headrace_workers.quarantine import Quarantine
from headrace_workers.settlement import RunTask, Settlement
from headrace_workers.supervisor import DeathCause, EngineSupervisor
from headrace_workers.tracing import RequestTracing

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)

HEARTBEAT_SECONDS = 1.0


class Dispatcher:
    """Owns every request of this worker, from its fetch to its acknowledgement. Implements `EngineEvents`.

    Args:
        client: Redis for streams and registry.
        served_names: the model's names, each of which is a queue; the first one is its own.
        max_num_seqs: choices that the engine runs at once.
        max_delay_seconds: how far ahead a message's ETA may lie.
        store_result: as `Settlement` says.
        logits_processors: import paths of the engine's, which say what `extra_args` a request may have.
        on_given_up: called with the reason when the engine cannot be kept alive.
        tracer_provider: OpenTelemetry's; None traces nothing.
    """

    supervisor: EngineSupervisor

    def __init__(
        self,
        *,
        client: "redis.Redis",
        stream_ttl_seconds: int,
        served_names: Sequence[str],
        adapters: Adapters,
        worker_name: str,
        tokenizer: Callable[[], ModelTokenizer],
        max_num_seqs: int,
        max_delay_seconds: float,
        metrics: Metrics,
        health: WorkerHealth,
        store_result: Callable[[str, dict[str, Any]], None],
        on_given_up: Callable[[str], None],
        logits_processors: Sequence[str] = (),
        tracer_provider: Any = None,
    ) -> None:
        self._client = client
        self._writer = StreamWriter(client, stream_ttl_seconds)
        self._tracing = RequestTracing(tracer_provider, served_names[0])
        self.settlement = Settlement(self._writer, metrics, store_result, self._tracing)
        self._served_names = served_names
        self._adapters = adapters
        self._worker_name = worker_name
        self._load_tokenizer = tokenizer
        self._logits_processors = load_logits_processors(logits_processors)
        self._max_num_seqs = max_num_seqs
        self._max_delay_seconds = max_delay_seconds
        self._metrics = metrics
        self._health = health
        self._on_given_up = on_given_up
        self._jobs: dict[str, Job] = {}
        self._quarantine = Quarantine(EngineLosses(client))
        self._listeners = ListenerWatch(Listeners(client))
        self._intake: Intake | None = None
        self._output_processor: OutputProcessor | None = None
        self._engine_waiting = 0
        self._draining = False
        self._paused = False
        self._last_step: StepStats | None = None
        self._given_up = False
        self._redis_refuses = False
        """Redis failed a claim; nothing more is taken until the next heartbeat."""
        self._hub: Any = None
        self._heartbeat_at: float | None = None

    # -- capacity -------------------------------------------------------------------------------------------------

    def attach(self, hub: Any) -> None:
        """The event loop for timers; again after each reconnect."""
        self._hub = hub
        self.settlement.attach(hub)
        self._listeners.lost_sight()

    def credit(self) -> int:
        """How many more messages may be taken now: free slots, none while the engine itself has some waiting."""
        if (
            self._draining
            or self._paused
            or self._redis_refuses
            or not self.supervisor.is_ready
            or self._engine_waiting
        ):
            return 0
        if self._quarantine.keeps_others_out:
            return 0
        if len(self._jobs) >= self._max_num_seqs:  # asked many times a second, and each job has a choice that runs
            return 0
        return max(0, self._max_num_seqs - self._slots_used())

    def _slots_used(self) -> int:
        return sum(job.num_unfinished for job in self._jobs.values())

    @property
    def is_draining(self) -> bool:
        return self._draining

    @property
    def is_idle(self) -> bool:
        """Nothing in flight, nothing to write, nothing to acknowledge."""
        return not self._jobs and self.settlement.is_idle

    def __len__(self) -> int:
        return len(self._jobs)

    # -- from the queue -------------------------------------------------------------------------------------------

    def accept(self, celery_request: Any, run_task: RunTask) -> None:
        """Take a message that Celery has received; `run_task` stores its result and acknowledges it."""
        incoming = Incoming.read(celery_request)
        self._metrics.message_received(
            incoming.priority, incoming.waited, incoming.tenant, trace_id=self._tracing.sender_trace_id(incoming)
        )
        if incoming.redelivered:
            self._metrics.message_redelivered()
        known = self._jobs.get(incoming.request_id) or self.settlement.ending(incoming.request_id)
        if known is not None:
            self._adopt(known, celery_request, run_task)
            return
        # A message with an ETA passes through Celery's timer, and meanwhile there may be no room for it any more.
        if self._intake is None or self._draining or self._paused or (celery_request.eta and self.credit() <= 0):
            celery_request.hand_back()
            return
        if 0 < incoming.delay <= self._max_delay_seconds:
            celery_request.postpone(incoming.delay)
            return
        try:
            if incoming.over_quota and not self._writer.exists(incoming.request_id):  # else it runs, sent twice
                raise RefusedError(
                    "quota_exceeded",
                    f"the queue holds {incoming.over_quota} requests of this tenant, which is as many as it may",
                )
            self._start(incoming, self._intake, celery_request, run_task)
        except RefusedError as refusal:
            self.settlement.refuse(incoming, refusal.error, celery_request, run_task)
        except Exception as error:  # noqa: BLE001  # whatever it is, the request gets an answer
            self._forget(incoming.request_id)
            if isinstance(error, REDIS_ERRORS) and "WRONGTYPE" not in str(error):
                logger.warning("request goes back to the queue", request_id=incoming.request_id, error=str(error))
                self._redis_refuses = True
                celery_request.hand_back()
                return
            logger.error("request could not be taken in", request_id=incoming.request_id, raised=frames(error))
            failure = ErrorInfo("engine_error", f"the request could not be taken in: {type(error).__name__}")
            self.settlement.refuse(incoming, failure, celery_request, run_task)

    def _forget(self, request_id: str) -> None:
        """Undo a start that failed halfway."""
        job = self._jobs.get(request_id)
        if job is not None:
            self._abandon(job)

    def _start(self, incoming: Incoming, intake: Intake, celery_request: Any, run_task: RunTask) -> None:
        request = intake.process(incoming)
        started = time.perf_counter()
        span = self._tracing.begin(incoming)
        claim = self._writer.claim(
            incoming.request_id, self._worker_name, self._tracing.traceparent(span), incoming.abandon_after
        )
        self._metrics.redis_command("claim", time.perf_counter() - started)
        if claim.ended is not None:
            self.settlement.finish_ended(incoming.request_id, claim, celery_request, run_task)
            return
        job = intake.job(incoming, request, claim, celery_request, run_task)
        job.span, job.trace_id = span, self._tracing.trace_id(span)
        self._jobs[job.request_id] = job
        self._metrics.request_started()
        if claim.attempt > 1:
            logger.info("request continues", **job.log_fields, resumed_tokens=job.num_tokens)
        celery_request.on_accepted(self.supervisor.pid, time.monotonic())
        self._schedule_deadline(job, incoming)
        if job.num_unfinished and self._listeners.is_abandoned(job):
            self._end_unheard(job)
        elif job.num_unfinished:
            self._follow(job)
            if self._quarantine.admits(job):
                self.supervisor.send(job.core_requests())
            else:
                self._go_on_with_quarantine()
        else:  # everything was generated, only the end was not written
            self._complete(job)
            self._flush()

    def _follow(self, job: Job) -> None:
        assert self._output_processor is not None
        self._output_processor.add_request(job.request)
        for index, choice in enumerate(job.choices):
            if choice.finish_reason is not None:
                self._output_processor.finish_choice(job.request_id, index, choice.finish_reason, choice.stop_reason)

    def _adopt(self, job: Job, celery_request: Any, run_task: RunTask) -> None:
        """The same request again, under another lease: go on under the new one and settle the old one."""
        old, job.celery_request, job.run_task = job.celery_request, celery_request, run_task
        task_ready(old)  # forgets the id, too
        task_reserved(celery_request)
        celery_request.on_accepted(self.supervisor.pid, time.monotonic())
        if old.lease_id != celery_request.lease_id:  # the very same message has one lease, whoever fetches it
            old.cost(0)  # the new one pays
            old.acknowledge()  # refused by Redis where the old lease was lost

    def _schedule_deadline(self, job: Job, incoming: Incoming) -> None:
        if incoming.deadline is not None:
            delay = max(0.0, incoming.deadline - time.time())
            job.timers.append(self._hub.call_later(delay, partial(self._expire, job)))

    # -- ended from outside ---------------------------------------------------------------------------------------

    def terminate(self, request_id: str) -> bool:
        """Celery's revoke with terminate. Returns whether the request was here."""
        job = self._jobs.get(request_id)
        if job is None:
            return False
        self._publish_unshown(job, self._abort(job))
        self.settlement.revoke(job)
        self._flush()
        return True

    def lease_lost(self, message: Any) -> None:
        """Another worker has this message: stop, write nothing more, acknowledge nothing."""
        self._metrics.lease_lost()
        job = self._jobs.get(message.headers.get("id"))
        if job is not None and job.celery_request.lease_id == message.delivery_tag:
            logger.warning("request was taken over by another worker", **job.log_fields)
            self._abandon(job)
            task_ready(job.celery_request)

    def _expire(self, job: Job) -> None:
        if self._jobs.get(job.request_id) is job:
            self._publish_unshown(job, self._abort(job))
            self.settlement.expire(job)
            self._flush()

    def _end_all_unheard(self) -> None:
        if self.settlement.waits_for_redis:
            self._listeners.lost_sight()
            return
        for job in self._listeners.abandoned(self._jobs.values()):
            self._end_unheard(job)

    def _end_unheard(self, job: Job) -> None:
        self._publish_unshown(job, self._abort(job))
        self.settlement.abandon(job)
        self._flush()

    def _abort(self, job: Job) -> RequestOutput | None:
        """Take a request out of engine and books; its stream and its message are the caller's.

        Returns what was not shown yet, under stream_interval.
        """
        del self._jobs[job.request_id]
        job.cancel_timers()
        assert self._output_processor is not None
        aborted = self._output_processor.abort(job.request_id)
        if aborted is None:
            return None
        self.supervisor.abort(aborted[1])
        return aborted[0]

    def _publish_unshown(self, job: Job, last: RequestOutput | None) -> None:
        for completion in last.outputs if last is not None else ():
            if completion.token_ids:
                completion.finish_reason = None  # the end of the stream says why
                self.settlement.publish([job.take(completion, last)])

    def _abandon(self, job: Job) -> None:
        self._abort(job)
        self.settlement.forget(job)
        self._tracing.end(job, None)
        self._metrics.request_handed_back()

    # -- from the engine ------------------------------------------------------------------------------------------

    def on_engine_ready(self, model_info: ModelInfo) -> None:
        if self._intake is None:
            tokenizer = self._load_tokenizer()
            processor = InputProcessor(model_info, tokenizer, logits_processors=self._logits_processors)
            self._intake = Intake(processor, self._served_names, self._adapters, self._max_delay_seconds)
            self._output_processor = OutputProcessor(tokenizer)
        assert self._output_processor is not None
        self._model_info = model_info
        self._metrics.model_loaded(
            architecture=model_info.architecture,
            dtype=model_info.dtype,
            device=model_info.device,
            attention=model_info.attention,
        )
        self._engine_waiting = 0
        self._metrics.engine_up(True)
        self.set_state("draining" if self._draining or self._paused else "ready")
        self.register_model()
        self._send_chosen()

    def _send_chosen(self) -> None:
        """To an engine that has no request: all, or the suspect that is to run alone."""
        assert self._output_processor is not None
        for job in self._quarantine.choose(self._jobs.values()):
            self._send_again(job, self._output_processor)

    def _send_again(self, job: Job, output_processor: OutputProcessor) -> None:
        todo = job.core_requests()
        output_processor.abort(job.request_id)  # what stream_interval held back will be generated again
        self._follow(job)
        self.supervisor.send(todo)

    def on_engine_outputs(self, outputs: EngineCoreOutputs) -> None:
        assert self._output_processor is not None
        # A request that waits for its adapter's turn says nothing about slots and memory, of which there may be enough.
        self._engine_waiting = outputs.stats.waiting - sum(waits for _, waits in outputs.stats.lora_requests.values())
        self._last_step = outputs.stats
        self._metrics.step(asdict(outputs.stats))
        self._health.stepped()
        started = time.perf_counter()
        self._note_admitted(outputs.stats)
        processed = self._output_processor.process(outputs.outputs)
        self.supervisor.abort(processed.finished_choice_ids)
        for output in processed.request_outputs:
            self._publish(output)
        detokenized = time.perf_counter()
        self._flush()
        self._metrics.result_phases(detokenized - started, time.perf_counter() - detokenized)
        self._go_on_with_quarantine()

    def _note_admitted(self, stats: StepStats) -> None:
        """A request's time in the engine's queue ends where its first step began."""
        for choice in stats.admitted_choice_ids:
            job = self._jobs.get(request_id_of(choice))
            if job is not None and job.admitted_at is None:
                job.admitted_at = max(job.received_at, time.monotonic() - stats.step_seconds)
                self._metrics.request_admitted(job.admitted_at - job.received_at, trace_id=job.trace_id)

    def on_engine_lost(self, reason: str, cause: DeathCause, *, was_ready: bool) -> None:
        """All requests wait for the next engine process, but for the one that is to blame."""
        self._metrics.engine_up(False)
        self._metrics.engine_restarted(cause)
        self.set_state("draining" if self._draining else "loading")
        if was_ready:  # one that was still loading had no request yet
            poison = self._quarantine.engine_lost(self._jobs.values())
            if poison is not None:
                self._bury(poison, reason)
        self._flush()

    def _bury(self, job: Job, reason: str) -> None:
        logger.error("request kills the engine", **job.log_fields, reason=reason)
        self.supervisor.forgive()
        self._publish_unshown(job, self._abort(job))
        job.celery_request.burial = f"poison: {reason}"
        message = f"the engine died three times while it computed this request, at last with it alone: {reason}"
        self.settlement.complete(job, "error", ErrorInfo("dead_letter", message))

    def _go_on_with_quarantine(self) -> None:
        """If the suspect has ended or shown its innocence, it is the next one's turn, or all others'."""
        if not self.supervisor.is_ready:
            return
        suspect = self._quarantine.alone
        if suspect is None:
            if self._quarantine.is_time(self._jobs.values()):
                self._send_chosen()
            return
        if self._jobs.get(suspect.request_id) is suspect:
            if not self._quarantine.is_acquitted:
                return
            logger.info("request does not kill the engine", **suspect.log_fields)
            self._abandon(suspect)
            self._quarantine.acquit(suspect)
            suspect.celery_request.hand_back()
        self._send_chosen()

    def on_engine_given_up(self, reason: str) -> None:
        self._given_up = True
        self.drain()
        self._on_given_up(reason)

    def _publish(self, output: RequestOutput) -> None:
        job = self._jobs[output.request_id]
        now = time.monotonic()
        job.num_cached_tokens = max(job.num_cached_tokens, output.num_cached_tokens)
        for completion in output.outputs:
            if not completion.token_ids:  # the engine refused it: there is nothing to show but the end
                job.choices[completion.index].finish_reason = completion.finish_reason
                continue
            self.settlement.publish([job.take(completion, output)])
            if job.first_token_at is None:
                job.first_token_at = now
                since = None if job.enqueued_at is None or job.attempt > 1 else time.time() - job.enqueued_at
                prefill = None if job.admitted_at is None else now - job.admitted_at
                self._metrics.first_token(since, now - job.received_at, prefill, trace_id=job.trace_id)
                job.num_first_tokens = job.num_tokens
            gap = None if job.last_token_at is None else now - job.last_token_at
            self._metrics.tokens_published(len(completion.token_ids), gap, trace_id=job.trace_id)
        job.last_token_at = now
        if output.finished:
            del self._jobs[job.request_id]
            job.cancel_timers()
            self._complete(job, output.error)

    def _complete(self, job: Job, error: str | None = None) -> None:
        """All choices have ended."""
        if error is not None:
            self.settlement.complete(job, "error", ErrorInfo("engine_error", error))
            return
        self._jobs.pop(job.request_id, None)
        reason = job.choices[0].finish_reason or "stop"
        self.settlement.complete(job, "length" if reason == "length" else "stop")

    def _flush(self, *, retry: bool = False) -> None:
        """Write what is to be written, and stop what its stream refuses to take."""
        for key, outcome in self.settlement.flush(retry=retry).items():
            job = self._jobs.get(key[0])
            if job is not None and job.key == key:  # an older attempt's refusal is nothing to its successor
                self._abort(job)
                self.settlement.refused(job, outcome)

    # -- beside the work ------------------------------------------------------------------------------------------

    def heartbeat(self) -> None:
        """Once a second from the event loop."""
        self._redis_refuses = False
        self._metrics.heartbeat()
        now = time.monotonic()
        if self._heartbeat_at is not None:
            self._metrics.loop_lag(now - self._heartbeat_at - HEARTBEAT_SECONDS)
        self._heartbeat_at = now
        self._health.heartbeat(len(self._jobs))
        self._metrics.slots(min(self._slots_used(), self._max_num_seqs), self._max_num_seqs)
        self._flush(retry=True)
        self._quarantine.record(self._jobs.values())
        self._end_all_unheard()
        self._go_on_with_quarantine()
        self.supervisor.check_progress(has_work=any(job.num_unfinished for job in self._jobs.values()))

    def set_state(self, state: str) -> None:
        assert state in ("loading", "ready", "draining")
        self._metrics.worker_state(state)  # type: ignore[arg-type]
        self._health.state(state)  # type: ignore[arg-type]

    def register_model(self) -> None:
        """Tell clients that this model is served."""
        try:
            for name in self._served_names:
                register_model(
                    self._client,
                    name,
                    max_model_len=self._model_info.max_model_len,
                    worker=self._worker_name,
                    seen=time.time(),
                )
        except REDIS_ERRORS as error:
            logger.warning("model could not be registered", error=str(error))

    def pause(self) -> None:
        """Take nothing more until `resume`; what runs goes on."""
        self._paused = True
        self.set_state("draining")

    def resume(self) -> bool:
        """Undo `pause`; False where the worker drains for good."""
        if self._draining:
            return False
        self._paused = False
        self.set_state("ready" if self.supervisor.is_ready else "loading")
        return True

    def stats(self) -> dict[str, Any]:
        """Plain numbers and states for an operator."""
        last = self._last_step
        return {
            "model": self._served_names[0],
            "state": self._health.not_ready() or "ready",
            "paused": self._paused,
            "draining": self._draining,
            "requests": len(self._jobs),
            "slots_used": self._slots_used(),
            "slots": self._max_num_seqs,
            "engine": {
                "pid": self.supervisor.pid,
                "ready": self.supervisor.is_ready,
                "running": last.running if last is not None else 0,
                "waiting": last.waiting if last is not None else 0,
                "kv_blocks_used": last.kv_blocks_used if last is not None else 0,
                "kv_blocks_total": last.kv_blocks_total if last is not None else 0,
                "isolating": self._quarantine.alone is not None,
            },
            "totals": asdict(self._metrics.totals),
            "slowest_requests": [job.summary() for job in nsmallest(5, self._jobs.values(), key=_receipt)],
        }

    def drain(self) -> None:
        """Take nothing more; what runs goes on."""
        self._draining = True
        self.set_state("draining")

    def hand_back(self) -> int:
        """Give every request that is not complete back to the queue; another worker continues it from its stream.

        Where the engine could not be kept alive, one of these requests may be the reason, and it counts as a strike.
        """
        self._flush(retry=True)
        jobs = list(self._jobs.values())
        for job in reversed(jobs):  # the last first: they come out again in their order
            self._abandon(job)
            job.celery_request.hand_back(strike=self._given_up)
        return len(jobs)

    def stop(self) -> None:
        self.settlement.stop()


def _receipt(job: Job) -> float:
    return job.received_at
