"""`Admission`: takes messages from the queue while the engine has room, and answers those that cannot be served.

    queue --accept--> `Preparation` --`StreamClaims`--> `InFlight`

Runs on the thread of Celery's event loop only. `preparation` decodes and checks messages, `StreamClaims` claims
streams, `in_flight.py` runs the requests.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import structlog
from celery.worker.state import task_ready, task_reserved

from headrace_broker.models.identity import ModelIdentity
from headrace_broker.queue.dead_letters import DeadLetter
from headrace_broker.results import ErrorInfo
from headrace_broker.server.connections import REDIS_ERRORS
from headrace_engine.api.decide import decision_request
from headrace_engine.api.input_processor import CheckedPrompt, ProcessedRequest
from headrace_engine.requests.lora_request import LoRARequest
from headrace_engine.requests.pooling_request import PoolingCoreRequest
from headrace_engine.requests.sampling_params import SamplingParams
from headrace_monitoring.logging import frames
from headrace_monitoring.metrics import Metrics
from headrace_wire.codes import DeadLetterReason, ErrorCode
from headrace_workers.preparation.celery_request import CeleryRequest
from headrace_workers.preparation.decision_intake import PreparedDecision
from headrace_workers.preparation.intake import Incoming, Prepared, RefusedError
from headrace_workers.preparation.plain_requests import AnyPrepared
from headrace_workers.preparation.pooling_intake import PreparedInputs
from headrace_workers.preparation.preparation import POSTPONE_SECONDS, Preparation, PreparationError, Preparing
from headrace_workers.preparation.preparer_process import MakeProcess
from headrace_workers.requests.engine_watch import EngineWatch
from headrace_workers.requests.fetch_quantum import QUANTA_ALONE, choices_to_fetch
from headrace_workers.requests.job import Job
from headrace_workers.requests.preemption import Preemption
from headrace_workers.requests.service_state import ServedModel, ServiceState
from headrace_workers.requests.settlement import Settlement
from headrace_workers.requests.stream_homes import StreamHomes
from headrace_workers.requests.streams import StreamClaims
from headrace_workers.requests.token_credit import BYTES_PER_TOKEN, TokenCredit
from headrace_workers.requests.tracing import RequestTracing

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)


class Admission:
    """Decides which messages this worker takes. Implements `WorkerPort`, through which the transport asks for them.

    Args:
        make_process: makes the two processes that prepare messages.
        preemption: preempts requests for those of higher priority.
        worker_name: names the writer of each attempt in its stream.
    """

    def __init__(
        self,
        model: ServedModel,
        engine: EngineWatch,
        state: ServiceState,
        settlement: Settlement,
        homes: StreamHomes,
        metrics: Metrics,
        tracing: RequestTracing,
        make_process: MakeProcess,
        preemption: Preemption,
        worker_name: str,
    ) -> None:
        self._model = model
        self._engine = engine
        self._in_flight = engine.in_flight
        self._state = state
        self.settlement = settlement
        self._homes = homes
        self._metrics = metrics
        self._tracing = tracing
        self._preemption = preemption
        self.is_alone: Callable[[], bool] = lambda: False
        """Returns whether no other worker has served these queues for some seconds."""
        self._claims = StreamClaims(homes, settlement, metrics, tracing, worker_name)
        self.preparation = Preparation(
            make_process,
            model.adapters,
            model.names[0],
            max_messages=model.max_num_seqs,
            ready=self._on_prepared,
            refused=self._on_refused,
            undecodable=self._on_undecodable,
            postponed=self._on_postponed,
        )

    @property
    def _credit(self) -> TokenCredit | None:
        return self._engine.credit

    # -- for the transport ----------------------------------------------------------------------------------------

    @property
    def preemption_wait_seconds(self) -> float:
        return self._preemption.wait_seconds

    def free_slots(self) -> int:
        """Count the choices that messages taken now may have: free slots, or 0 while requests wait in the engine.

        At most `fetch_quantum` choices are taken before the engine begins a step with them. So a burst reaches all idle
        workers: each takes a few messages, and the next ones when its engine begins a step. Those that replace choices
        that ended with the last step come on top; see `choices_to_fetch`. A worker that is alone takes `QUANTA_ALONE`
        times as many. A worker of a pooling model may take the messages of one step, which are many if they are short.
        """
        # Called many times a second, so the cheap checks come first.
        if self._engine.num_waiting:
            return 0
        quantum = self._model.fetch_quantum * (QUANTA_ALONE if self.is_alone() else 1)
        if self._credit is not None:
            quantum = max(quantum, self._credit.step_messages)
        room = choices_to_fetch(
            max_num_seqs=self._model.max_num_seqs,
            quantum=quantum,
            slots_used=self._in_flight.slots_used,
            num_preparing=self.preparation.num_choices,
            num_slow=self.preparation.num_slow_choices,
            num_for_next_step=self._in_flight.num_for_next_step,
            num_ended=self._in_flight.num_ended,
        )
        if room <= 0 or self._takes_nothing:
            return 0
        if self._credit is None:
            return room
        return min(room, self._credit.messages(self._backlog(), len(self._in_flight) + len(self.preparation)))

    def _backlog(self) -> int:
        """Estimate the tokens that the engine must compute for the messages that were taken."""
        return self._in_flight.num_tokens_left + self.preparation.num_body_bytes // BYTES_PER_TOKEN

    def split_below(self) -> int:
        """See `InFlight.split_below`."""
        return self._in_flight.split_below

    def preemptible_slots(self) -> tuple[int, int]:
        """See `Preemption.preemptible_slots`."""
        if self._takes_nothing:
            return 0, 0
        num_preparing = self.preparation.num_choices
        return self._preemption.preemptible_slots(
            self._in_flight, num_preparing, engine_waiting=self._engine.num_waiting
        )

    @property
    def _takes_nothing(self) -> bool:
        """Whether messages stay in the queue even if there is room."""
        if not (self._state.takes_messages and self._engine.supervisor.is_ready):
            return True
        isolation = self._in_flight.isolation
        problem = self.preparation.problem or self._homes.problem
        return problem is not None or self.settlement.redis_refuses or isolation.blocks_new_requests

    def away_homes(self) -> set[str]:
        """See `StreamHomes.away`."""
        return self._homes.away()

    def token_seconds(self) -> float | None:
        """See `EngineWatch.token_seconds`."""
        return self._engine.token_seconds

    def lease_lost(self, message: Any) -> None:
        """Stop the request of a message that another worker has now. Nothing more is written or acknowledged for it."""
        self._metrics.lease_lost()
        preparing = self.preparation.get(message.headers.get("id"))
        if preparing is not None and preparing.celery_request.lease_id == message.delivery_tag:
            self.preparation.drop(preparing)
            task_ready(preparing.celery_request)
            return
        job = self._in_flight.get(message.headers.get("id"))
        if job is not None and job.celery_request.lease_id == message.delivery_tag:
            logger.warning("request taken over by another worker", **job.log_fields)
            self._in_flight.drop(job)
            task_ready(job.celery_request)

    def dead_lettered(self, letter: DeadLetter) -> None:
        """See `Settlement.dead_letter`."""
        self.settlement.dead_letter(letter)

    def refused(self, reason: str) -> None:
        """See `Settlement.on_refused`."""
        self.settlement.on_refused(reason)

    # -- tokenizer calls ------------------------------------------------------------------------------------------

    @property
    def answers_calls(self) -> bool:
        """Whether tokenizer calls may be taken. They need neither a slot nor a running engine."""
        return self._engine.processor is not None and self._state.takes_messages

    def answer_call(self, kind: str, body: bytes, answered: Callable[[bytes], None]) -> None:
        """See `Preparation.answer_call`."""
        self.preparation.answer_call(kind, body, answered)

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
            self.preparation.get(incoming.request_id)
            or self._in_flight.get(incoming.request_id)
            or self._in_flight.ending(incoming.request_id)
        )
        if known is not None:
            if known.celery_request.delivery.content == celery_request.delivery.content:
                self._adopt(known, celery_request)
            else:
                self.settlement.reject_duplicate(incoming.request_id, celery_request)
            return
        if not self.answers_calls:
            self._metrics.message_returned("not_ready")
            celery_request.requeue()
            return
        if celery_request.delivery.lost:
            self.settlement.finish_lost(celery_request)
            return
        with self._answering(incoming, celery_request):
            home = self._homes.servers.home_at(celery_request.delivery.home, incoming.request_id)
            with self._homes.writing(home) as writer:
                is_repeat = bool(incoming.over_quota and writer.exists(incoming.request_id))
            if incoming.over_quota and not is_repeat:
                raise RefusedError(
                    ErrorCode.QUOTA_EXCEEDED,
                    f"the queue holds {incoming.over_quota} requests of this tenant, which is its limit",
                )
            if incoming.header_problem is not None:
                raise RefusedError(ErrorCode.INVALID_REQUEST, incoming.header_problem)
            if incoming.delay > (longest := self._model.max_delay_seconds):
                raise RefusedError(
                    ErrorCode.INVALID_REQUEST,
                    f"eta or countdown must be at most {longest:g} s ahead, got {incoming.delay:.0f} s",
                )
            if incoming.delay > 0:
                celery_request.postpone(incoming.delay)
            else:
                self.preparation.begin(incoming, celery_request)

    @contextmanager
    def _answering(self, incoming: Incoming, celery_request: CeleryRequest) -> Iterator[None]:
        """Answer the request if any exception is raised."""
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

    def _on_prepared(self, message: Preparing, prepared: AnyPrepared, adapter: LoRARequest | None) -> None:
        with self._answering(message.incoming, message.celery_request):
            num_choices = prepared.num_choices
            if message.celery_request.revoked():
                return  # it was revoked or has expired, and Celery has settled it
            if self._in_flight.has_room(message.incoming.step, num_choices):
                self._start(message, prepared, adapter)
            else:  # the message did not say how many choices it has
                self._metrics.message_returned("no_room")
                message.celery_request.requeue(choices=num_choices)

    def _on_refused(self, message: Preparing, error: Exception) -> None:
        with self._answering(message.incoming, message.celery_request):
            raise error

    def _on_undecodable(self, message: Preparing, problem: str) -> None:
        request, why = message.celery_request, f"the message is malformed: {problem}"
        logger.error("message refused", request_id=message.request_id, reason=why, content_type=request.content_type)
        self.settlement.refuse_malformed(message.request_id, request.delivery, why, request.content_type)
        request.dead_letter(DeadLetterReason.REJECTED, why)

    def _on_postponed(self, message: Preparing) -> None:
        self._metrics.message_returned("not_ready")
        message.celery_request.postpone(POSTPONE_SECONDS, keeps_place=True)

    def _forget(self, request_id: str) -> None:
        """Undo a start that failed halfway."""
        message = self.preparation.get(request_id)
        if message is not None:
            self.preparation.drop(message)
        job = self._in_flight.get(request_id)
        if job is not None:
            self._in_flight.drop(job)

    def _start(self, message: Preparing, prepared: AnyPrepared, adapter: LoRARequest | None) -> None:
        request: ProcessedRequest | PoolingCoreRequest
        labels: Sequence[str] = ()
        if isinstance(prepared, PreparedInputs):
            request = self._assemble_inputs(message.incoming, prepared)
            assert self._engine.model_info.pooling is not None
            labels = self._engine.model_info.pooling.labels if prepared.task == "classify" else ()
            if self._credit is not None:
                self._credit.took(prepared.num_tokens)
        else:
            request = self._assemble(message.incoming, prepared, adapter)
        fingerprint = self._model.adapters.fingerprint(adapter) if adapter is not None else ""
        model = ModelIdentity(self._model.names[0], self._engine.model_info.weights, fingerprint)
        draws = self._engine.capabilities.draws or ""
        job = self._claims.claim(message.incoming, prepared, message.celery_request, request, model, draws, labels)
        if job is not None:
            self._in_flight.start(job, message.incoming.deadline, partial(self._preemption.make_room, self._in_flight))

    def _assemble(
        self, incoming: Incoming, prepared: Prepared | PreparedDecision, adapter: LoRARequest | None
    ) -> ProcessedRequest:
        processor = self._engine.processor
        assert processor is not None
        common = (
            # without priorities in the engine, the queue's order is kept all the same
            incoming.engine_priority if self._engine.capabilities.priority else 0,
            incoming.enqueued_at if incoming.enqueued_at is not None else time.time(),
            "" if self._model.share_prefix_cache else _salt(incoming),
            adapter,
        )
        if isinstance(prepared, PreparedDecision):
            return decision_request(processor, incoming.request_id, prepared.plan, *common)
        prompt = CheckedPrompt(None, prepared.token_ids, prepared.bad_words_token_ids)
        return processor.assemble(incoming.request_id, prompt, SamplingParams.from_wire(prepared.params), *common)

    def _assemble_inputs(self, incoming: Incoming, prepared: PreparedInputs) -> PoolingCoreRequest:
        return PoolingCoreRequest(
            request_id=incoming.request_id,
            task=prepared.task,
            inputs=prepared.inputs,
            second_from=prepared.second_from,
            num_prompt_tokens=prepared.num_prompt_tokens,
            dimensions=prepared.dimensions,
            normalize=prepared.normalize,
            activation=prepared.activation,
            priority=incoming.engine_priority if self._engine.capabilities.priority else 0,
            tenant=incoming.tenant or "",
            arrival_time=incoming.enqueued_at if incoming.enqueued_at is not None else time.time(),
        )

    def _adopt(self, job: "Job | Preparing", celery_request: CeleryRequest) -> None:
        """Continue a request under the lease of its redelivered message, and settle the old lease."""
        old, job.celery_request = job.celery_request, celery_request
        task_ready(old)  # also removes the id
        task_reserved(celery_request)
        if isinstance(job, Job):  # else it is accepted when it is prepared
            celery_request.on_accepted(self._engine.supervisor.pid, time.monotonic())
        if old.lease_id != celery_request.lease_id:  # one message fetched twice has one lease
            old.cost(None)  # the tenant is charged under the new lease
            old.acknowledge()  # Redis refuses this if the old lease was lost

    # -- revoked or requeued -----------------------------------------------------------------------------------

    def terminate(self, request_id: str) -> bool:
        """End a request on Celery's revoke with terminate. Returns whether this worker had it."""
        message = self.preparation.get(request_id)
        if message is not None:
            self.preparation.drop(message)
            message.celery_request.announce_terminated_in_queue()
            return True
        job = self._in_flight.get(request_id)
        if job is None:
            return False
        self._in_flight.revoke(job)
        return True

    def heartbeat(self) -> None:
        """Let Celery settle messages that were revoked or expired during their preparation. Call it once a second."""
        for message in self.preparation.heartbeat():
            if message.celery_request.revoked():
                self.preparation.drop(message)

    def requeue_unprepared(self) -> int:
        """Requeue the messages that are not prepared yet. Returns their number."""
        messages = self.preparation.drop_all()
        for message in reversed(messages):  # each goes to the front, so the last one goes first
            message.celery_request.requeue()
        return len(messages)


def _salt(incoming: Incoming) -> str:
    """Return the salt of the prefix cache. Because of the lengths, no two pairs of names have the same salt."""
    names = (incoming.tenant, incoming.cache_salt)
    return "" if names == (None, None) else "".join("-" if name is None else f"{len(name)} {name}" for name in names)
