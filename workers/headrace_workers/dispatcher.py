"""`Dispatcher`: takes requests from the queue while the engine has room, and answers those that cannot be served.

    queue --accept--> `Preparation` --`StreamClaims`--> `InFlight` --engine, text, chunks--> `Settlement`

Runs on the thread of Celery's event loop only. `preparation.py` decodes and checks messages, `stream_claims.py` claims
streams, `in_flight.py` holds running requests, `settlement.py` ends them.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from heapq import nsmallest
from operator import attrgetter
from typing import Any

import redis
import structlog
from celery.worker.state import task_ready, task_reserved

from headrace_broker.connections import REDIS_ERRORS
from headrace_broker.model_identity import ModelIdentity
from headrace_broker.reasons import DeadLetterReason, ErrorCode
from headrace_broker.registry import register_model
from headrace_broker.results import ErrorInfo
from headrace_broker.streams import StreamWriter
from headrace_engine.capabilities import EngineCapabilities
from headrace_engine.core.outputs import EngineCoreOutputs, StepStats
from headrace_engine.engine_names import OWN_ENGINE
from headrace_engine.input_processor import CheckedPrompt, InputProcessor, ProcessedRequest
from headrace_engine.lora_request import LoRARequest
from headrace_engine.runner.contracts import ModelInfo
from headrace_engine.sampling_params import SamplingParams
from headrace_monitoring.logging import frames
from headrace_monitoring.metrics import Metrics
from headrace_monitoring.worker_health import WorkerHealth
from headrace_workers.adapters import Adapters
from headrace_workers.answer_formats import AnswerFormats
from headrace_workers.celery_request import CeleryRequest
from headrace_workers.in_flight import InFlight
from headrace_workers.intake import Incoming, Prepared, RefusedError
from headrace_workers.job import Job
from headrace_workers.loop_watch import LoopWatch
from headrace_workers.plain_requests import PlainRequests
from headrace_workers.preemption import Preemption
from headrace_workers.preparation import POSTPONE_SECONDS, Preparation, PreparationError, Preparing
from headrace_workers.preparation_lane import MakeLane
from headrace_workers.settlement import Settlement, StoreResult
from headrace_workers.stream_claims import StreamClaims
from headrace_workers.supervisor import DeathCause, EngineEvents, EngineSupervisor
from headrace_workers.tracing import RequestTracing

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)

HEARTBEAT_SECONDS = 1.0


class Dispatcher:
    """Decides which messages this worker takes, and reports the worker's state. Implements `EngineEvents`.

    Args:
        client: Redis for streams and registry.
        served_names: the model's names. Each name is a queue; the first one is the model's own.
        supervise: makes the engine's supervisor, which reports engine events to the dispatcher.
        engine: name of the engine.
        make_lane: makes the two lanes that prepare messages.
        preparation_settings: the lanes' settings, except the engine's; see `preparation_process.make_preparer`.
        answer_formats: the formats in which the model writes tool calls and reasoning, for clients.
        share_prefix_cache: let requests reuse cached prefixes of other tenants' prompts.
        max_num_seqs: choices that the engine runs at once.
        max_delay_seconds: how far ahead a message's ETA may lie.
        preemption: preempts requests for those of higher priority.
        store_result: see `Settlement`.
        publish_interval: see `InFlight`.
        on_given_up: called with the reason when the engine cannot be kept alive.
        tracer_provider: OpenTelemetry's; None traces nothing.
    """

    def __init__(
        self,
        *,
        client: "redis.Redis",
        stream_ttl_seconds: int,
        served_names: Sequence[str],
        adapters: Adapters,
        worker_name: str,
        supervise: Callable[[EngineEvents], EngineSupervisor],
        make_lane: MakeLane,
        preparation_settings: Mapping[str, Any],
        max_num_seqs: int,
        max_delay_seconds: float,
        metrics: Metrics,
        health: WorkerHealth,
        store_result: StoreResult,
        on_given_up: Callable[[str], None],
        preemption: Preemption,
        engine: str = OWN_ENGINE,
        share_prefix_cache: bool = False,
        answer_formats: AnswerFormats | None = None,
        publish_interval: float = 0.0,
        tracer_provider: Any = None,
    ) -> None:
        self._client = client
        self._writer = StreamWriter(client, stream_ttl_seconds)
        self._tracing = RequestTracing(tracer_provider, served_names[0])
        self.settlement = Settlement(self._writer, metrics, store_result, self._tracing)
        self._claims = StreamClaims(self._writer, self.settlement, metrics, self._tracing, worker_name)
        self._served_names = served_names
        self._adapters = adapters
        self._worker_name = worker_name
        self.supervisor = supervise(self)
        self._preparation_settings = {**preparation_settings, "served_names": list(served_names), "engine": engine}
        self._engine = engine
        self._share_prefix_cache = share_prefix_cache
        self._answer_formats = answer_formats or AnswerFormats()
        self._formats: dict[str, Any] = {}
        self._max_num_seqs = max_num_seqs
        self._max_delay_seconds = max_delay_seconds
        self._metrics = metrics
        self._health = health
        self._on_given_up = on_given_up
        self._preemption = preemption
        self._in_flight = InFlight(
            client, self._writer, self.supervisor, self.settlement, metrics, self._tracing, publish_interval
        )
        self._preparation = Preparation(
            make_lane,
            adapters,
            served_names[0],
            max_messages=max_num_seqs,
            ready=self._on_prepared,
            refused=self._on_refused,
            undecodable=self._on_undecodable,
            postponed=self._on_postponed,
        )
        self._processor: InputProcessor | None = None
        self.loop_watch = LoopWatch()
        self._model_info: ModelInfo
        self._capabilities: EngineCapabilities
        self._engine_waiting = 0
        self.is_draining = False
        self._paused = False
        self._last_step = StepStats()
        self._given_up = False

    # -- capacity -------------------------------------------------------------------------------------------------

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

    def credit(self) -> int:
        """Count the messages that may be taken now: the free slots, or 0 while requests wait in the engine."""
        room = self._max_num_seqs - len(self._preparation)  # each will have at least one choice
        # Called many times a second, so a cheap check comes first: each job has at least one unfinished choice.
        if self._engine_waiting or len(self._in_flight) >= room or self._takes_nothing:
            return 0
        return max(0, room - self._in_flight.slots_used)

    def preemption_credit(self) -> tuple[int, int]:
        """Get the lowest priority step that can be preempted, and how many messages of higher priority may be taken."""
        if self._takes_nothing:
            return 0, 0
        return self._preemption.credit(self._in_flight, len(self._preparation), engine_waiting=self._engine_waiting)

    @property
    def _takes_nothing(self) -> bool:
        """Whether messages stay in the queue even if there is room."""
        if self.is_draining or self._paused or not self.supervisor.is_ready:
            return True
        isolation = self._in_flight.isolation
        return self.settlement.redis_refuses or self._preparation.is_failing or isolation.blocks_new_requests

    @property
    def is_idle(self) -> bool:
        """Whether no message is held, nothing is left to write and nothing to acknowledge."""
        return self._in_flight.is_idle and not self._preparation and self.settlement.is_idle

    def __len__(self) -> int:
        return len(self._in_flight)

    # -- tokenizer calls ------------------------------------------------------------------------------------------

    @property
    def answers_calls(self) -> bool:
        """Whether tokenizer calls may be taken. They need neither a slot nor a running engine."""
        return self._processor is not None and not (self.is_draining or self._paused)

    def answer_call(self, kind: str, body: bytes, answered: Callable[[bytes], None]) -> None:
        """See `Preparation.answer_call`."""
        self._preparation.answer_call(kind, body, answered)

    # -- from the queue -------------------------------------------------------------------------------------------

    def accept(self, celery_request: CeleryRequest) -> None:
        """Take a message that Celery has received."""
        incoming = Incoming.read(celery_request)
        self._metrics.message_received(
            incoming.priority,
            incoming.waited,
            incoming.tenant,
            clock=incoming.clock,
            trace_id=self._tracing.sender_trace_id(incoming),
        )
        if incoming.redelivered:
            self._metrics.message_redelivered()
        known = (
            self._preparation.get(incoming.request_id)
            or self._in_flight.get(incoming.request_id)
            or self._in_flight.ending(incoming.request_id)
        )
        if known is not None:
            if known.celery_request.content == celery_request.content:
                self._adopt(known, celery_request)
            else:
                self.settlement.reject_duplicate(incoming.request_id, celery_request)
            return
        if self._processor is None or self.is_draining or self._paused:
            self._metrics.message_returned("not_ready")
            celery_request.hand_back()
            return
        with self._answering(incoming, celery_request):
            if incoming.over_quota and not self._writer.exists(incoming.request_id):  # else it was sent twice, and runs
                raise RefusedError(
                    ErrorCode.QUOTA_EXCEEDED,
                    f"the queue holds {incoming.over_quota} requests of this tenant, which is its limit",
                )
            if incoming.delay > self._max_delay_seconds:
                raise RefusedError(
                    ErrorCode.INVALID_REQUEST,
                    f"eta or countdown must be at most {self._max_delay_seconds:g} s ahead, got {incoming.delay:.0f} s",
                )
            if incoming.delay > 0:
                celery_request.postpone(incoming.delay)
            else:
                self._preparation.begin(incoming, celery_request)

    @contextmanager
    def _answering(self, incoming: Incoming, celery_request: CeleryRequest) -> Iterator[None]:
        """Answer the request whatever exception is raised."""
        try:
            yield
        except RefusedError as refusal:
            self.settlement.refuse(incoming, refusal.error, celery_request)
        except Exception as error:  # noqa: BLE001  # the request gets an answer in any case
            self._forget(incoming.request_id)
            if isinstance(error, REDIS_ERRORS) and "WRONGTYPE" not in str(error):
                self.settlement.return_to_queue(celery_request, error)
                return
            kind, raised = type(error).__name__, frames(error)
            if isinstance(error, PreparationError):
                kind, raised = error.kind, error.raised
            logger.error("request could not be started", request_id=incoming.request_id, raised=raised)
            failure = ErrorInfo(ErrorCode.ENGINE_ERROR, f"the request could not be started: {kind}")
            self.settlement.refuse(incoming, failure, celery_request)

    # -- prepared -------------------------------------------------------------------------------------------------

    def _on_prepared(self, message: Preparing, prepared: Prepared, adapter: LoRARequest | None) -> None:
        with self._answering(message.incoming, message.celery_request):
            if not message.celery_request.revoked():  # else it was revoked or has expired, and Celery has settled it
                self._start(message, prepared, adapter)

    def _on_refused(self, message: Preparing, error: Exception) -> None:
        with self._answering(message.incoming, message.celery_request):
            raise error

    def _on_undecodable(self, message: Preparing, problem: str) -> None:
        request, why = message.celery_request, f"the message is malformed: {problem}"
        logger.error("message refused", request_id=message.request_id, reason=why, content_type=request.content_type)
        self.settlement.refuse_malformed(message.request_id, request.content, why, request.content_type)
        request.dead_letter(DeadLetterReason.REJECTED, why)

    def _on_postponed(self, message: Preparing) -> None:
        self._metrics.message_returned("not_ready")
        message.celery_request.postpone(POSTPONE_SECONDS, keeps_place=True)

    def _forget(self, request_id: str) -> None:
        """Undo a start that failed halfway."""
        message = self._preparation.get(request_id)
        if message is not None:
            self._preparation.drop(message)
        job = self._in_flight.get(request_id)
        if job is not None:
            self._in_flight.drop(job)

    def _start(self, message: Preparing, prepared: Prepared, adapter: LoRARequest | None) -> None:
        request = self._assemble(message.incoming, prepared, adapter)
        fingerprint = self._adapters.fingerprint(adapter) if adapter is not None else ""
        model = ModelIdentity(self._served_names[0], self._model_info.weights, fingerprint)
        draws = self._capabilities.draws or ""
        job = self._claims.claim(message.incoming, prepared, message.celery_request, request, model, draws)
        if job is not None:
            self._in_flight.start(job, message.incoming.deadline, partial(self._preemption.make_room, self._in_flight))

    def _assemble(self, incoming: Incoming, prepared: Prepared, adapter: LoRARequest | None) -> ProcessedRequest:
        assert self._processor is not None
        shares = self._share_prefix_cache or incoming.tenant is None
        return self._processor.assemble(
            incoming.request_id,
            CheckedPrompt(None, prepared.token_ids, prepared.bad_words_token_ids),
            SamplingParams.from_wire(prepared.params),
            incoming.priority if self._capabilities.priority else 0,  # the queue's order is kept all the same
            incoming.enqueued_at if incoming.enqueued_at is not None else time.time(),
            "" if shares else f"tenant {incoming.tenant}",
            adapter,
        )

    def _adopt(self, job: "Job | Preparing", celery_request: CeleryRequest) -> None:
        """Continue a request under the lease of its redelivered message, and settle the old lease."""
        old, job.celery_request = job.celery_request, celery_request
        task_ready(old)  # also removes the id
        task_reserved(celery_request)
        if isinstance(job, Job):  # else it is accepted when it is prepared
            celery_request.on_accepted(self.supervisor.pid, time.monotonic())
        if old.lease_id != celery_request.lease_id:  # one message fetched twice has one lease
            old.cost(0)  # the tenant is charged under the new lease
            old.acknowledge()  # Redis refuses this if the old lease was lost

    # -- revoked or taken over ------------------------------------------------------------------------------------

    def terminate(self, request_id: str) -> bool:
        """End a request on Celery's revoke with terminate. Returns whether this worker had it."""
        message = self._preparation.get(request_id)
        if message is not None:
            self._preparation.drop(message)
            message.celery_request.announce_terminated_in_queue()
            return True
        job = self._in_flight.get(request_id)
        if job is None:
            return False
        self._in_flight.revoke(job)
        return True

    def lease_lost(self, message: Any) -> None:
        """Stop the request of a message that another worker has now. Nothing more is written or acknowledged for it."""
        self._metrics.lease_lost()
        preparing = self._preparation.get(message.headers.get("id"))
        if preparing is not None and preparing.celery_request.lease_id == message.delivery_tag:
            self._preparation.drop(preparing)
            task_ready(preparing.celery_request)
            return
        job = self._in_flight.get(message.headers.get("id"))
        if job is not None and job.celery_request.lease_id == message.delivery_tag:
            logger.warning("request taken over by another worker", **job.log_fields)
            self._in_flight.drop(job)
            task_ready(job.celery_request)

    # -- from the engine ------------------------------------------------------------------------------------------

    def on_engine_ready(self, model_info: ModelInfo, capabilities: EngineCapabilities) -> None:
        if self._processor is None:
            if not (capabilities.cache_salt or self._share_prefix_cache):
                self._end_worker(
                    f"the engine {self._engine} cannot separate the prefix caches of tenants: set"
                    " HEADRACE_SHARE_PREFIX_CACHE=true or HEADRACE_ENABLE_PREFIX_CACHING=false"
                )
                return
            self._use_first_engine(model_info, capabilities)
        elif self._model_info.weights and model_info.weights not in ("", self._model_info.weights):
            # The running requests began with the files that the previous engine process loaded.
            self._end_worker(
                "the model's files were replaced while the worker ran: its engine has loaded weights"
                f" {model_info.weights} after {self._model_info.weights}; start the worker again"
            )
            return
        elif capabilities != self._capabilities:
            self._end_worker(
                f"the engine {self._engine} was replaced while the worker ran, and has other capabilities;"
                " start the worker again"
            )
            return
        self._model_info = model_info
        self._metrics.model_loaded(
            architecture=model_info.architecture,
            dtype=model_info.dtype,
            device=model_info.device,
            attention=model_info.attention,
            engine=self._engine,
            engine_version=capabilities.version,
        )
        self._engine_waiting = 0
        self._metrics.engine_up(True)
        self.set_state("draining" if self.is_draining or self._paused else "ready")
        self.register_model()
        self._in_flight.send_chosen()

    def _use_first_engine(self, model_info: ModelInfo, capabilities: EngineCapabilities) -> None:
        """Configure the worker for its first engine process. Later processes must match it."""
        tokenizer, parts = self.supervisor.tokenizer, self.supervisor.tokenizer_parts
        self._processor = InputProcessor(model_info, tokenizer, engine=self._engine, capabilities=capabilities)
        self._capabilities = capabilities
        self._in_flight.use_engine(capabilities)
        self._metrics.steps_tell_only(capabilities.stats)
        self._formats = self._answer_formats.of(parts, tokenizer)
        settings = {
            **self._preparation_settings,
            "tokenizer": asdict(parts),
            "model_info": asdict(model_info),
            "capabilities": capabilities.to_wire(),
        }
        plain = None if settings["logits_processors"] else PlainRequests(self._processor, self._served_names)
        self._preparation.configure(settings, plain)

    def _end_worker(self, reason: str) -> None:
        """End a worker that cannot continue with the engine that is ready."""
        self.drain()
        self.hand_back()
        self._on_given_up(reason)

    def on_engine_outputs(self, outputs: EngineCoreOutputs) -> None:
        # A request that waits for its adapter does not mean that slots or memory are short.
        self._engine_waiting = outputs.stats.waiting - sum(waits for _, waits in outputs.stats.lora_requests.values())
        self._last_step = outputs.stats
        self._metrics.step(outputs.stats)
        self._health.stepped()
        self._in_flight.publish(outputs)

    def on_engine_lost(self, reason: str, cause: DeathCause, *, was_ready: bool) -> None:
        self._metrics.engine_up(False)
        self._metrics.engine_restarted(cause)
        self.set_state("draining" if self.is_draining else "loading")
        self._in_flight.engine_lost(reason, was_ready=was_ready)

    def on_engine_given_up(self, reason: str) -> None:
        self._given_up = True
        self.drain()
        self._on_given_up(reason)

    # -- state and control ----------------------------------------------------------------------------------------

    def heartbeat(self) -> None:
        """Do the periodic work; the event loop calls it once a second."""
        self.settlement.heartbeat()
        self._metrics.heartbeat()
        self._metrics.loop_lag(self.loop_watch.longest_turn())
        self._health.heartbeat(len(self._in_flight))
        self._health.preparation_fails(self._preparation.is_failing)
        self._metrics.slots(min(self._in_flight.slots_used, self._max_num_seqs), self._max_num_seqs)
        self._in_flight.heartbeat()
        for message in self._preparation.heartbeat():
            if message.celery_request.revoked():  # it was revoked or has expired, and Celery settles it
                self._preparation.drop(message)

    def set_state(self, state: str) -> None:
        assert state in ("loading", "ready", "draining")
        self._metrics.worker_state(state)  # type: ignore[arg-type]
        self._health.state(state)  # type: ignore[arg-type]

    def register_model(self) -> None:
        """Publish in Redis that this worker serves its model."""
        try:
            for name in self._served_names:
                register_model(
                    self._client,
                    name,
                    max_model_len=self._model_info.max_model_len,
                    worker=self._worker_name,
                    seen=time.time(),
                    weights=self._model_info.weights,
                    loras=self._adapters.names,
                    tokenizer_calls=True,
                    **self._formats,
                )
        except REDIS_ERRORS as error:
            logger.warning("model not registered", error=str(error))

    def pause(self) -> None:
        """Take no messages until `resume`. Running requests continue."""
        self._paused = True
        self._hand_back_unprepared()
        self.set_state("draining")

    def resume(self) -> bool:
        """Undo `pause`. Returns False if the worker drains for good."""
        if self.is_draining:
            return False
        self._paused = False
        self.set_state("ready" if self.supervisor.is_ready else "loading")
        return True

    def stats(self) -> dict[str, Any]:
        """Give numbers and states to an operator. None stands for a number that the engine does not report."""
        levels = ("running", "waiting", "kv_blocks_used", "kv_blocks_total")
        reported = levels if self._processor is None else self._capabilities.stats
        return {
            "model": self._served_names[0],
            "state": self._health.not_ready() or "ready",
            "paused": self._paused,
            "draining": self.is_draining,
            "preparing": len(self._preparation),
            "requests": len(self._in_flight),
            "slots_used": self._in_flight.slots_used,
            "slots": self._max_num_seqs,
            "engine": {
                "name": self._engine,
                "pid": self.supervisor.pid,
                "ready": self.supervisor.is_ready,
                **{name: getattr(self._last_step, name) if name in reported else None for name in levels},
                "isolating": self._in_flight.isolation.alone is not None,
            },
            "totals": asdict(self._metrics.totals),
            "slowest_requests": [job.summary() for job in nsmallest(5, self._in_flight, key=attrgetter("received_at"))],
        }

    def drain(self) -> None:
        """Take no more messages. Running requests continue."""
        self.is_draining = True
        self._hand_back_unprepared()
        self.set_state("draining")

    def _hand_back_unprepared(self) -> None:
        for message in reversed(self._preparation.drop_all()):  # each goes to the front, so the last one goes first
            message.celery_request.hand_back()

    def hand_back(self) -> int:
        """Return every incomplete request to the queue. Another worker resumes it from its stream.

        If the engine could not be kept alive, one of these requests may be the cause, so their deliveries count.
        """
        self._in_flight.flush(retry=True)
        jobs = list(self._in_flight)
        for job in reversed(jobs):  # each goes to the front, so the last one goes first
            reason = "engine_given_up" if self._given_up else "drain"
            self._in_flight.hand_back(job, reason, is_counted=self._given_up)
        return len(jobs)

    def stop(self) -> None:
        self._preparation.close()
        self.settlement.stop()
