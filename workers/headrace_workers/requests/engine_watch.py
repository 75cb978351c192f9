"""`EngineWatch`: keeps what this worker knows of its engine, and reacts to the engine's events.

    engine --outputs, losses--> `InFlight` --text, chunks--> `Settlement`

Runs on the thread of Celery's event loop only.
"""

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

import redis
import structlog

from headrace_broker.models.registry import register_model
from headrace_broker.server.connections import REDIS_ERRORS
from headrace_engine.api.input_processor import InputProcessor
from headrace_engine.core.outputs import EngineCoreOutputs, StepStats
from headrace_engine.options.capabilities import EngineCapabilities
from headrace_engine.runner.contracts import ModelInfo
from headrace_monitoring.health import WorkerHealth
from headrace_monitoring.metrics import Metrics
from headrace_wire.codes import EngineDeathCause
from headrace_workers.engine_link.supervisor import EngineEvents, EngineSupervisor
from headrace_workers.preparation.plain_requests import PlainRequests, intake_of
from headrace_workers.requests.engine_outputs import reader_for
from headrace_workers.requests.in_flight import InFlight
from headrace_workers.requests.loading_report import LoadingReport
from headrace_workers.requests.service_state import ServedModel, ServiceState
from headrace_workers.requests.token_credit import TokenCredit
from headrace_workers.requests.token_speed import TokenSpeed

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)

Configure = Callable[[dict[str, Any], PlainRequests | None], None]
"""Configures the preparation of messages; see `Preparation.configure`."""

_BUSY_SHARE: Final = 0.8
"""The speed is measured while this share of the slots is used. A full worker seldom uses all of them."""


class EngineWatch:
    """Implements `EngineEvents`.

    Args:
        client: Redis for the registry.
        supervise: makes the engine's supervisor, which reports engine events to this object.
        run: makes the requests in flight, which run in the supervisor's engine.
        configure: called once, when the first engine is ready.
        end_worker: called with the reason when the worker cannot continue with its engine.
    """

    def __init__(
        self,
        model: ServedModel,
        client: "redis.Redis",
        state: ServiceState,
        metrics: Metrics,
        health: WorkerHealth,
        *,
        worker_name: str,
        supervise: Callable[[EngineEvents], EngineSupervisor],
        run: Callable[[EngineSupervisor], InFlight],
        configure: Configure,
        end_worker: Callable[[str], None],
    ) -> None:
        self._model = model
        self._client = client
        self._state = state
        self._metrics = metrics
        self._health = health
        self._worker_name = worker_name
        self._configure = configure
        self._end_worker = end_worker
        self.supervisor = supervise(self)
        self.in_flight = run(self.supervisor)
        self.processor: InputProcessor | None = None
        """None until the first engine is ready. The two attributes below are set then."""
        self.model_info: ModelInfo
        self.capabilities: EngineCapabilities
        self._properties: dict[str, Any] = {}
        """Fields of `RegisteredModel`."""
        self.num_waiting = 0
        """Requests that wait in the engine for slots or memory, by the statistics of its last step."""
        self.credit: TokenCredit | None = None
        """Set for a pooling model: how many messages to take by their tokens."""
        self._last_step = StepStats()
        self._speed = TokenSpeed()
        self._loading = LoadingReport(client, worker_name, model.names)
        self.is_given_up = False
        """Whether the engine could not be kept alive."""

    @property
    def pools(self) -> bool:
        """Whether the model computes one row of numbers for each input. False until it is loaded."""
        return self.credit is not None

    def on_engine_loading(self, share: float) -> None:
        self._metrics.model_loading(share)
        self._health.loading(share)
        self._loading.progress = share

    def on_engine_ready(self, model_info: ModelInfo, capabilities: EngineCapabilities) -> None:
        if self.processor is None:
            has_cache = model_info.pooling is None
            if has_cache and not (capabilities.cache_salt or self._model.share_prefix_cache):
                self._end_worker(
                    f"the engine {self._model.engine} cannot separate the prefix caches of tenants: set"
                    " HEADRACE_SHARE_PREFIX_CACHE=true or HEADRACE_ENABLE_PREFIX_CACHING=false"
                )
                return
            self._use_first_engine(model_info, capabilities)
        elif self.model_info.weights and model_info.weights not in ("", self.model_info.weights):
            # The running requests began with the files that the previous engine process loaded.
            self._end_worker(
                "the model's files were replaced while the worker ran: its engine has loaded weights"
                f" {model_info.weights} after {self.model_info.weights}; start the worker again"
            )
            return
        elif capabilities != self.capabilities:
            self._end_worker(
                f"the engine {self._model.engine} was replaced while the worker ran, and has other capabilities;"
                " start the worker again"
            )
            return
        self.model_info = model_info
        self._metrics.model_loaded(
            architecture=model_info.architecture,
            dtype=model_info.dtype,
            device=model_info.device,
            attention=model_info.attention,
            engine=self._model.engine,
            engine_version=capabilities.version,
        )
        self.num_waiting = 0
        self._metrics.engine_up(True)
        self.register_model()  # before the worker is ready: a client refuses a model that no worker has served
        self._loading.end()
        self._state.show(engine_is_ready=True)
        self.in_flight.send_chosen()

    def _use_first_engine(self, model_info: ModelInfo, capabilities: EngineCapabilities) -> None:
        """Configure the worker for its first engine process. Later processes must match it."""
        tokenizer, parts = self.supervisor.tokenizer, self.supervisor.tokenizer_parts
        self.processor = InputProcessor(model_info, tokenizer, engine=self._model.engine, capabilities=capabilities)
        self.capabilities = capabilities
        if model_info.pooling is not None:
            self.credit = TokenCredit(model_info.pooling.max_step_tokens)
        self.in_flight.use_engine(capabilities, reader_for(pools=model_info.pooling is not None, tokenizer=tokenizer))
        self._metrics.steps_report_only(capabilities.stats)
        self._metrics.show_kinds(generates=model_info.pooling is None, pools=model_info.pooling is not None)
        self._properties = {
            **self._model.answer_formats.of(parts, tokenizer),
            **_task_properties(model_info, can_decide=capabilities.logprob_token_ids and tokenizer.has_chat_template),
        }
        settings = {
            **self._model.preparation_settings,
            "served_names": list(self._model.names),
            "engine": self._model.engine,
            "callback_rules": [list(self._model.callback_rules.tasks), list(self._model.callback_rules.queues)],
            "tokenizer": asdict(parts),
            "model_info": asdict(model_info),
            "capabilities": capabilities.to_wire(),
        }
        intake = intake_of(self.processor, tokenizer, self._model.names, self._model.callback_rules)
        self._configure(settings, None if settings["logits_processors"] else PlainRequests(intake))

    def on_engine_outputs(self, outputs: EngineCoreOutputs) -> None:
        # A request that waits for its adapter does not mean that slots or memory are short.
        if self.model_info.pooling is None:  # a pooling model's requests wait by design: see `Admission.free_slots`
            self.num_waiting = outputs.stats.waiting - sum(waits for _, waits in outputs.stats.lora_requests.values())
        self._last_step = outputs.stats
        self._metrics.step(outputs.stats)
        self._health.stepped()
        self.in_flight.publish(outputs)

    def measure_speed(self) -> None:
        """Observe the tokens computed so far; call it once a second. The first speed is registered at once."""
        before = self._speed.tokens_per_second
        self._speed.observe(self.in_flight.num_tokens_published, is_busy=self.supervisor.is_ready and self._is_busy())
        if before is None and self._speed.tokens_per_second is not None:
            self.register_model()

    @property
    def token_seconds(self) -> float | None:
        """The time in which one request gets one token while the worker is busy; None if it is not measured.

        The requests of a full worker share its speed. A pooling model computes the inputs of a message in one step.
        """
        speed = self._speed.tokens_per_second
        if speed is None:
            return None
        return (1 if self.credit is not None else self._model.max_num_seqs) / speed

    def _is_busy(self) -> bool:
        if self.credit is not None:
            return self.credit.is_busy(self.in_flight.num_tokens_left)
        # requests that wait in the engine for memory: it runs as many as it can
        return self.num_waiting > 0 or self.in_flight.slots_used >= _BUSY_SHARE * self._model.max_num_seqs

    def on_engine_lost(self, reason: str, cause: EngineDeathCause, *, was_ready: bool) -> None:
        self._metrics.engine_up(False)
        self._metrics.engine_restarted(cause)
        self._health.loading(0.0)
        self._loading.begin()
        self._state.show(engine_is_ready=False)
        self.in_flight.engine_lost(reason, was_ready=was_ready)

    def on_engine_given_up(self, reason: str) -> None:
        self.is_given_up = True
        self._end_worker(reason)

    def report_loading(self) -> None:
        """Publish in Redis that this worker is loading its model, if it is. Call it about every 2 s."""
        if not self.supervisor.is_ready and not self.is_given_up and self._state.takes_messages:
            self._loading.send()

    def stop(self) -> None:
        """Publish that this worker is not loading any more."""
        self._loading.end()

    def register_model(self) -> None:
        """Publish in Redis that this worker serves its model."""
        try:
            for name in self._model.names:
                register_model(
                    self._client,
                    name,
                    max_model_len=self.model_info.max_model_len,
                    worker=self._worker_name,
                    seen=time.time(),
                    weights=self.model_info.weights,
                    loras=self._model.adapters.names,
                    tokenizer_calls=True,
                    tokens_per_second=self._speed.tokens_per_second,
                    **self._properties,
                )
        except REDIS_ERRORS as error:
            logger.warning("model not registered", error=str(error))

    def stats(self) -> dict[str, Any]:
        """Return figures and states for operators. None stands for a figure that the engine does not report."""
        levels = ("running", "waiting", "kv_blocks_used", "kv_blocks_total")
        reported = levels if self.processor is None else self.capabilities.stats
        return {
            "name": self._model.engine,
            "pid": self.supervisor.pid,
            "ready": self.supervisor.is_ready,
            **{name: getattr(self._last_step, name) if name in reported else None for name in levels},
            "isolating": self.in_flight.isolation.alone is not None,
        }


def _task_properties(model: ModelInfo, *, can_decide: bool) -> dict[str, Any]:
    """Return the fields of `RegisteredModel` that name the tasks of a model and describe those of pooling.

    Args:
        can_decide: whether a model that generates also answers the questions of decisions.
    """
    pooling = model.pooling
    if pooling is None:
        return {"tasks": ("generate", "decide") if can_decide else ("generate",)}
    return {
        "tasks": pooling.tasks,
        "dimensions": pooling.dimensions if "embed" in pooling.tasks else None,
        "matryoshka": bool(pooling.matryoshka_dimensions) or pooling.takes_any_dimensions,
        "max_input_tokens": pooling.max_input_tokens,
        "prompts": tuple(pooling.prompts),
        "batch_invariant": pooling.batch_invariant,
    }
