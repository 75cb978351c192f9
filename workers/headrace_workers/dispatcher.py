"""`Dispatcher`: moves requests between the queue, the engine and their streams.

    queue --accept--> claim the stream, validate, --> engine
    engine --outputs--> text, chunks --> stream; the last one --> result, acknowledgement

Runs on the thread of Celery's event loop alone; only the end-of-task work of a request goes to the finisher's thread.
"""

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import redis
import structlog
from celery.worker.state import task_ready, task_reserved

from headrace_broker.connections import REDIS_ERRORS
from headrace_broker.dead_letters import DUPLICATE, DeadLetter
from headrace_broker.registry import register_model
from headrace_broker.results import ErrorInfo, GenerateResult
from headrace_broker.streams import Claim, StreamWriter, WriteOutcome
from headrace_engine.core.outputs import EngineCoreOutputs
from headrace_engine.input_processor import InputProcessor
from headrace_engine.output_processor import OutputProcessor
from headrace_engine.outputs import RequestOutput
from headrace_engine.runner.contracts import ModelInfo
from headrace_engine.tokenizer import ModelTokenizer
from headrace_monitoring.labels import Outcome
from headrace_monitoring.metrics import Metrics
from headrace_monitoring.worker_health import WorkerHealth
from headrace_workers.finisher import Finisher
from headrace_workers.intake import MALFORMED, Incoming, Intake, RefusedError
from headrace_workers.job import Job, recorded_result
from headrace_workers.publisher import Publisher
from headrace_workers.supervisor import EngineSupervisor

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)

ENGINE_LOSS_LIMIT = 3
"""A request that was in so many engine processes when they died is given up."""
_MALFORMED = ErrorInfo("invalid_request", MALFORMED)
_CANCELLED = ErrorInfo("cancelled", "the request was cancelled")
_EXPIRED = ErrorInfo("expired", "the deadline passed before the request was complete")


class Dispatcher:
    """Owns every request of this worker, from its fetch to its acknowledgement. Implements `EngineEvents`.

    Args:
        client: Redis for streams and registry.
        served_name: the model's name in the queue.
        max_num_seqs: choices that the engine runs at once.
        store_result: stores a request's result where no Celery request is at hand; called on the finisher's thread.
        on_given_up: called with the reason when the engine cannot be kept alive.
    """

    supervisor: EngineSupervisor

    def __init__(
        self,
        *,
        client: "redis.Redis",
        stream_ttl_seconds: int,
        served_name: str,
        worker_name: str,
        tokenizer: Callable[[], ModelTokenizer],
        max_num_seqs: int,
        metrics: Metrics,
        health: WorkerHealth,
        store_result: Callable[[str, dict[str, Any]], None],
        on_given_up: Callable[[str], None],
    ) -> None:
        self._client = client
        self._writer = StreamWriter(client, stream_ttl_seconds)
        self._publisher = Publisher(self._writer, metrics)
        self._served_name = served_name
        self._worker_name = worker_name
        self._load_tokenizer = tokenizer
        self._max_num_seqs = max_num_seqs
        self._metrics = metrics
        self._health = health
        self._store_result = store_result
        self._on_given_up = on_given_up
        self._finisher = Finisher()
        self._jobs: dict[str, Job] = {}
        self._published_last: list[tuple[Job, GenerateResult, Outcome]] = []
        """Complete, but the end of the stream is not in Redis yet."""
        self._intake: Intake | None = None
        self._output_processor: OutputProcessor | None = None
        self._engine_waiting = 0
        self._draining = False
        self._given_up = False
        self._redis_refuses = False
        """Redis failed a claim; nothing more is taken until the next heartbeat."""
        self._hub: Any = None

    # -- capacity -------------------------------------------------------------------------------------------------

    def attach(self, hub: Any) -> None:
        """The event loop for timers; again after each reconnect."""
        self._hub = hub

    def credit(self) -> int:
        """How many more messages may be taken now: free slots, none while the engine itself has some waiting."""
        if self._draining or self._redis_refuses or not self.supervisor.is_ready or self._engine_waiting:
            return 0
        if len(self._jobs) >= self._max_num_seqs:  # asked many times a second, and each job has a choice that runs
            return 0
        return max(0, self._max_num_seqs - self._slots_used())

    def _slots_used(self) -> int:
        return sum(job.num_unfinished for job in self._jobs.values())

    @property
    def is_idle(self) -> bool:
        """Nothing in flight, nothing to write, nothing to acknowledge."""
        return not (self._jobs or self._published_last or len(self._publisher) or self._finisher.busy)

    def __len__(self) -> int:
        return len(self._jobs)

    # -- from the queue -------------------------------------------------------------------------------------------

    def accept(self, celery_request: Any, run_task: Callable[[dict[str, Any]], None]) -> None:
        """Take a message that Celery has received; `run_task` stores its result and acknowledges it."""
        incoming = Incoming.read(celery_request)
        self._metrics.message_received(incoming.priority, incoming.waited)
        if incoming.redelivered:
            self._metrics.message_redelivered()
        known = self._jobs.get(incoming.request_id)
        if known is not None:
            self._adopt(known, celery_request, run_task)
            return
        if self._intake is None or self._draining:  # a delayed message comes when its time has come
            celery_request.hand_back()
            return
        try:
            self._start(incoming, self._intake, celery_request, run_task)
        except RefusedError as refusal:
            self._refuse(incoming, refusal.error, celery_request, run_task)
        except Exception as error:
            self._forget(incoming.request_id)
            if isinstance(error, REDIS_ERRORS) and "WRONGTYPE" not in str(error):
                logger.warning("request goes back to the queue", request_id=incoming.request_id, error=str(error))
                self._redis_refuses = True
                celery_request.hand_back()
                return
            logger.exception("request could not be taken in", request_id=incoming.request_id)
            failure = ErrorInfo("engine_error", f"the request could not be taken in: {type(error).__name__}")
            self._refuse(incoming, failure, celery_request, run_task)

    def _forget(self, request_id: str) -> None:
        """Undo a start that failed halfway."""
        job = self._jobs.get(request_id)
        if job is not None:
            self._abandon(job)

    def _start(
        self, incoming: Incoming, intake: Intake, celery_request: Any, run_task: Callable[[dict[str, Any]], None]
    ) -> None:
        request = intake.process(incoming)
        started = time.perf_counter()
        claim = self._writer.claim(incoming.request_id, self._worker_name)
        self._metrics.redis_command("claim", time.perf_counter() - started)
        if claim.ended is not None:
            self._finish_ended(incoming.request_id, claim, celery_request, run_task)
            return
        job = intake.job(incoming, request, claim, celery_request, run_task)
        self._jobs[job.request_id] = job
        self._metrics.request_started()
        if claim.attempt > 1:
            logger.info(
                "request continues", request_id=job.request_id, attempt=claim.attempt, resumed_tokens=job.num_tokens
            )
        celery_request.on_accepted(self.supervisor.pid, time.monotonic())
        self._schedule_deadline(job, incoming)
        if job.num_unfinished:
            self._follow(job)
            self.supervisor.send(job.core_requests())
        else:  # everything was generated, only the end was not written
            self._complete(job)
            self._flush()

    def _follow(self, job: Job) -> None:
        assert self._output_processor is not None
        self._output_processor.add_request(job.request)
        for index, choice in enumerate(job.choices):
            if choice.finish_reason is not None:
                self._output_processor.finish_choice(job.request_id, index, choice.finish_reason, choice.stop_reason)

    def _adopt(self, job: Job, celery_request: Any, run_task: Callable[[dict[str, Any]], None]) -> None:
        """The same request again, under another lease: go on under the new one and settle the old one."""
        old, job.celery_request, job.run_task = job.celery_request, celery_request, run_task
        task_ready(old)  # forgets the id, too
        task_reserved(celery_request)
        celery_request.on_accepted(self.supervisor.pid, time.monotonic())
        old.acknowledge()  # refused by Redis where the old lease was lost

    def _schedule_deadline(self, job: Job, incoming: Incoming) -> None:
        if incoming.deadline is not None:
            delay = max(0.0, incoming.deadline - time.time())
            job.timers.append(self._hub.call_later(delay, partial(self._expire, job)))

    def _finish_ended(
        self, request_id: str, claim: Claim, celery_request: Any, run_task: Callable[[dict[str, Any]], None]
    ) -> None:
        """The stream says that the request is over; only the result or the acknowledgement is missing."""
        assert claim.ended is not None
        logger.info("request had ended already", request_id=request_id, finish_reason=claim.ended.finish_reason)
        if claim.ended.finish_reason == "cancelled":
            self._metrics.request_refused("cancelled")
        result = recorded_result(request_id, claim.entries, claim.ended)
        self._finish(celery_request, partial(run_task, result.to_wire()))

    def _finish(self, celery_request: Any, finish: Callable[[], None]) -> None:
        """Store, announce and acknowledge; a message whose result cannot be stored is delivered again."""
        self._finisher.submit(finish, on_failure=partial(self._hub.call_soon, celery_request.let_go))

    def _refuse(
        self,
        incoming: Incoming,
        error: ErrorInfo,
        celery_request: Any,
        run_task: Callable[[dict[str, Any]], None],
    ) -> None:
        """Answer a request that cannot be served: an end in its stream, an error in its result."""
        logger.info("request refused", request_id=incoming.request_id, code=error.code)
        self._metrics.request_refused("rejected")
        self.end_stream(incoming.request_id, "rejected", error)
        result = GenerateResult(incoming.request_id, [], None, error).to_wire()

        def finish() -> None:
            if incoming.is_well_formed:
                run_task(result)
            else:  # Celery's tracer would stumble over the body, too
                self._store_result(incoming.request_id, result)
                celery_request.on_success((False, "", 0.0))

        self._finish(celery_request, finish)

    def refuse_malformed(self, request_id: str) -> None:
        """Answer a message that Celery could not even read; the consumer rejects the message itself."""
        self._metrics.request_refused("rejected")
        if self.end_stream(request_id, "rejected", _MALFORMED):
            self._store_error(request_id, _MALFORMED)

    def dead_letter(self, letter: DeadLetter) -> None:
        """A message will not be delivered again: tell whoever waits for its stream or its result."""
        self._metrics.dead_lettered(letter.reason)
        if letter.request_id is None or letter.reason == DUPLICATE:
            return
        error = ErrorInfo("dead_letter", f"given up after {letter.deliveries} deliveries: {letter.reason}")
        if self.end_stream(letter.request_id, "error", error):
            self._store_error(letter.request_id, error)

    def _store_error(self, request_id: str, error: ErrorInfo) -> None:
        result = GenerateResult(request_id, [], None, error).to_wire()
        self._finisher.submit(partial(self._store_result, request_id, result), on_failure=lambda: None)

    def end_stream(self, request_id: str, finish_reason: str, error: ErrorInfo) -> bool:
        """End the stream of a request that this worker does not hold; False where it had ended, or Redis refuses."""
        try:
            return self._writer.end_unclaimed(request_id, finish_reason, error)
        except (*REDIS_ERRORS, UnicodeError) as failure:  # an id of a malformed message may be no text at all
            logger.warning("stream could not be ended", request_id=request_id, error=str(failure))
            return False

    def revoked_in_queue(self, request_id: str, reason: str) -> None:
        """Celery dropped a request before it began: it was revoked, or its deadline had passed."""
        expired = reason == "expired"
        self._metrics.request_refused("expired" if expired else "cancelled")
        self.end_stream(request_id, "expired" if expired else "cancelled", _EXPIRED if expired else _CANCELLED)

    # -- ended from outside ---------------------------------------------------------------------------------------

    def terminate(self, request_id: str) -> bool:
        """Celery's revoke with terminate. Returns whether the request was here."""
        job = self._jobs.get(request_id)
        if job is None:
            return False
        self._publish_unshown(job, self._abort(job))
        self._publisher.add([job.end("cancelled", _CANCELLED)])
        self._finish_metrics(job, "cancelled")
        self._flush()
        announce = partial(job.celery_request._announce_revoked, "terminated", True, "SIGTERM", False)
        self._finish(job.celery_request, announce)
        return True

    def lease_lost(self, message: Any) -> None:
        """Another worker has this message: stop, write nothing more, acknowledge nothing."""
        self._metrics.lease_lost()
        job = self._jobs.get(message.headers.get("id"))
        if job is not None and job.celery_request.lease_id == message.delivery_tag:
            logger.warning("request was taken over by another worker", request_id=job.request_id)
            self._abandon(job)
            task_ready(job.celery_request)

    def _expire(self, job: Job) -> None:
        if self._jobs.get(job.request_id) is job:
            self._publish_unshown(job, self._abort(job))
            self._complete_with(job, "expired", _EXPIRED)
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
                self._publisher.add([job.take(completion, last)])

    def _abandon(self, job: Job) -> None:
        self._abort(job)
        self._publisher.drop(job.request_id)
        self._metrics.request_handed_back()

    # -- from the engine ------------------------------------------------------------------------------------------

    def on_engine_ready(self, model_info: ModelInfo) -> None:
        if self._intake is None:
            tokenizer = self._load_tokenizer()
            self._intake = Intake(InputProcessor(model_info, tokenizer), self._served_name)
            self._output_processor = OutputProcessor(tokenizer)
        assert self._output_processor is not None
        self._model_info = model_info
        self._engine_waiting = 0
        self._metrics.engine_up(True)
        self.set_state("draining" if self._draining else "ready")
        self.register_model()
        for job in self._jobs.values():
            self._send_again(job, self._output_processor)

    def _send_again(self, job: Job, output_processor: OutputProcessor) -> None:
        todo = job.core_requests()
        output_processor.abort(job.request_id)  # what stream_interval held back will be generated again
        self._follow(job)
        self.supervisor.send(todo)

    def on_engine_outputs(self, outputs: EngineCoreOutputs) -> None:
        assert self._output_processor is not None
        self._engine_waiting = outputs.stats.waiting
        self._metrics.step(asdict(outputs.stats))
        self._health.stepped()
        processed = self._output_processor.process(outputs.outputs)
        self.supervisor.abort(processed.finished_choice_ids)
        for output in processed.request_outputs:
            self._publish(output)
        self._flush()

    def on_engine_lost(self, reason: str, *, was_ready: bool) -> None:
        """All requests wait for the next engine process, but for those that were in too many dying ones."""
        self._metrics.engine_up(False)
        self._metrics.engine_restarted("crash")
        self.set_state("draining" if self._draining else "loading")
        for job in list(self._jobs.values()):
            job.engine_losses += was_ready  # one that was still loading had no request yet
            if job.engine_losses >= ENGINE_LOSS_LIMIT:
                self._publish_unshown(job, self._abort(job))
                message = f"the engine died {job.engine_losses} times while it computed this request: {reason}"
                self._complete_with(job, "error", ErrorInfo("engine_error", message))
        self._flush()

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
            self._publisher.add([job.take(completion, output)])
            if job.first_token_at is None:
                job.first_token_at = now
                since = None if job.enqueued_at is None or job.attempt > 1 else time.time() - job.enqueued_at
                self._metrics.first_token(since, now - job.received_at)
            gap = None if job.last_token_at is None else now - job.last_token_at
            self._metrics.tokens_published(len(completion.token_ids), gap)
        job.last_token_at = now
        if output.finished:
            del self._jobs[job.request_id]
            job.cancel_timers()
            self._complete(job, output.error)

    def _complete(self, job: Job, error: str | None = None) -> None:
        """All choices have ended: end the stream, and once that is written, store and acknowledge."""
        if error is not None:
            self._complete_with(job, "error", ErrorInfo("engine_error", error))
            return
        self._jobs.pop(job.request_id, None)
        reason = job.choices[0].finish_reason or "stop"
        self._complete_with(job, "length" if reason == "length" else "stop", None)

    def _complete_with(self, job: Job, finish_reason: Outcome, error: ErrorInfo | None) -> None:
        self._publisher.add([job.end(finish_reason, error)])
        self._published_last.append((job, job.result(error), finish_reason))

    def _flush(self, *, retry: bool = False) -> None:
        """Write what is to be written; then settle the requests whose end has been written or refused."""
        refused = self._publisher.flush(retry=retry)
        if refused is None:
            return  # Redis is away: the heartbeat tries again
        for request_id, outcome in refused.items():
            self._on_refused(request_id, outcome)
        complete, self._published_last = self._published_last, []
        for job, result, finish_reason in complete:
            if job.request_id in refused:
                self._settle_refused(job, refused[job.request_id])
            else:
                self._finish_metrics(job, finish_reason)
                self._finish(job.celery_request, partial(job.run_task, result.to_wire()))

    def _on_refused(self, request_id: str, outcome: WriteOutcome) -> None:
        job = self._jobs.get(request_id)
        if job is not None:
            self._abort(job)
            self._settle_refused(job, outcome)

    def _settle_refused(self, job: Job, outcome: WriteOutcome) -> None:
        """The stream takes nothing more from this attempt."""
        logger.info("stream refused a chunk", request_id=job.request_id, outcome=outcome.value)
        if outcome is WriteOutcome.FENCED:
            # Another worker has it under a message of its own; where this lease is lost too, the ack does nothing.
            self._metrics.request_handed_back()
            task_ready(job.celery_request)
            job.celery_request.acknowledge()
            return
        gone = outcome is WriteOutcome.GONE
        error = ErrorInfo("expired", "the stream has expired or was deleted") if gone else _CANCELLED
        self._finish_metrics(job, "expired" if gone else "cancelled")
        self._finish(job.celery_request, partial(job.run_task, job.result(error).to_wire()))

    def _finish_metrics(self, job: Job, outcome: Outcome) -> None:
        waited = 0.0 if job.enqueued_at is None else time.time() - job.enqueued_at
        self._metrics.request_finished(
            outcome,
            max(waited, time.monotonic() - job.received_at),
            len(job.request.prompt_token_ids),
            job.num_cached_tokens,
            job.num_tokens,
        )

    # -- beside the work ------------------------------------------------------------------------------------------

    def heartbeat(self) -> None:
        """Once a second from the event loop."""
        self._redis_refuses = False
        self._metrics.heartbeat()
        self._health.heartbeat(len(self._jobs))
        self._metrics.slots(min(self._slots_used(), self._max_num_seqs), self._max_num_seqs)
        self._flush(retry=True)

    def set_state(self, state: str) -> None:
        assert state in ("loading", "ready", "draining")
        self._metrics.worker_state(state)  # type: ignore[arg-type]
        self._health.state(state)  # type: ignore[arg-type]

    def register_model(self) -> None:
        """Tell clients that this model is served."""
        try:
            register_model(
                self._client,
                self._served_name,
                max_model_len=self._model_info.max_model_len,
                worker=self._worker_name,
                seen=time.time(),
            )
        except REDIS_ERRORS as error:
            logger.warning("model could not be registered", error=str(error))

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
        self._finisher.stop()
