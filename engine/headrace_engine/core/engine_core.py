"""The step loop.

One step is three lines: the scheduler decides how many tokens of each request to compute, the executor computes them,
and the scheduler takes in the new tokens. Everything else in this package serves one of these three. Imports no torch.
"""

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, cast

from headrace_engine.core.admission import NO_LORA, CoreAdmission
from headrace_engine.core.grammars import GrammarPreparation
from headrace_engine.core.kv_cache_manager import KVCacheManager, num_kv_blocks
from headrace_engine.core.lora_manager import LoRAManager
from headrace_engine.core.outputs import STEP_STATS, EngineCoreOutput, EngineCoreOutputs, StepStats
from headrace_engine.core.scheduler import Scheduler
from headrace_engine.core.state_slots import num_state_slots
from headrace_engine.core.step_execution import AheadExecutor, ComputedStep, SequentialExecutor, StepExecutor
from headrace_engine.core.tokenizer_source import TokenizerSource
from headrace_engine.errors import ConfigError, LoRAError
from headrace_engine.options.capabilities import EngineCapabilities
from headrace_engine.options.config import FITTING_LENGTH, EngineConfig
from headrace_engine.requests.request import EngineCoreRequest
from headrace_engine.runner.contracts import (
    DRAWS,
    KVSpec,
    LaunchingRunner,
    ModelInfo,
    ModelRunner,
    RunnerCapabilities,
)


class EngineCore:
    """Scheduler and runner of one model.

    Raises:
        ModelLoadError: the model cannot be loaded.
        ConfigError: the runner lacks a feature that is enabled, or the KV memory does not hold a single request of
            `max_model_len` tokens.
    """

    def __init__(self, config: EngineConfig, runner: ModelRunner) -> None:
        self.runner = runner
        self.model_info = runner.load_model()
        spec = runner.kv_spec()
        _check_features(config, runner.capabilities(), self.model_info.device)
        _check_states(config, spec, self.model_info.architecture)
        num_states = num_state_slots(config, spec)
        num_blocks = num_kv_blocks(config, spec, self.model_info.max_model_len, num_states)
        if config.model.max_model_len == FITTING_LENGTH:
            self.model_info = _shortened(self.model_info, (num_blocks - 1) * spec.block_size)
        runner.init_kv_cache(num_blocks, num_states)
        runner.warm_up()
        self.scheduler = Scheduler(
            config.scheduler,
            KVCacheManager(
                num_blocks,
                spec.block_size,
                enable_prefix_caching=config.cache.enable_prefix_caching,
                num_states=num_states,
            ),
            runner.capabilities(),
            self.model_info.max_model_len,
            config.speculative,
            max_loras=config.lora.max_loras if config.lora else 0,
        )
        self.wake: Callable[[], None] = _ignore_wake
        """Called, from any thread, when an adapter has become ready or free, and so `has_work()` may be true.

        An owner that sleeps while there is no work sets it.
        """
        self.loras = LoRAManager.create(config.lora, runner, lambda: self.wake())
        self._tokenizer = TokenizerSource(config, self.model_info)
        self._grammars = GrammarPreparation(self._tokenizer.create_grammar_compiler)
        self._admission = CoreAdmission(self.scheduler, self.loras, self._grammars, self.model_info.max_model_len)
        self._executor: StepExecutor = SequentialExecutor(runner)
        if config.scheduler.async_scheduling:
            self._executor = AheadExecutor(cast(LaunchingRunner, runner), self.scheduler)
        self._compilation = (0, 0.0, 0)
        """What the runner reported last: compiled graphs, seconds of compilation, operators that ran on the CPU."""
        self._step_lock = threading.Lock()
        """Held during a step, so that calls from other threads wait for its end."""

    def step(self) -> EngineCoreOutputs:
        """Compute one step. Call only while `has_work()`."""
        with self._step_lock:
            started = time.perf_counter()
            self._admission.admit_ready()
            batch = self.scheduler.schedule()
            stats = self.scheduler.stats
            stats.phase_seconds["schedule"] = time.perf_counter() - started
            outputs: list[EngineCoreOutput] = []
            updating = 0.0
            for computed in self._executor.execute(batch):
                received = time.perf_counter()
                outputs += self.scheduler.update_from_output(computed.batch, computed.output, computed.requests)
                self._record(stats, computed)
                updating += time.perf_counter() - received
            self._admission.prepare_again(self.scheduler.take_requests_without_grammar())
            stats.phase_seconds["update"] = updating
            stats.compiled_graphs, stats.warm_up_seconds, stats.fallback_operators = self._compilation
            stats.step_seconds = time.perf_counter() - started
            return EngineCoreOutputs(outputs=self._admission.take_outputs() + outputs, stats=stats)

    def has_work(self) -> bool:
        return self._admission.has_work() or self.scheduler.has_work()

    @property
    def capabilities(self) -> EngineCapabilities:
        """All features, adapters only if they are enabled. The constructor refuses options that the runner lacks."""
        has_loras = self.loras is not None
        everything = EngineCapabilities.of_everything(draws=DRAWS, stats=STEP_STATS)
        return replace(everything, lora=has_loras, lora_hot_load=has_loras)

    def add_request(self, message: EngineCoreRequest) -> None:
        """Queue a request. If it is refused or already complete, the next step returns its output."""
        self._admission.add(message)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        self._admission.abort(request_ids)
        self.scheduler.abort_requests(request_ids)

    def call(self, method: str, *args: Any) -> "Future[Any]":
        """Run a method outside the step loop, from any thread. `args` and the result are plain data.

        `tokenizer`: the model's `TokenizerParts`.
        `reset_prefix_cache`: forget all blocks; False if requests run.
        `add_lora`, `remove_lora`, `list_loras`, `pin_lora`: see `LoRAManager`.
        """
        if method == "tokenizer":
            return self._tokenizer.describe()
        if method != "reset_prefix_cache" and self.loras is not None:
            return self.loras.call(method, *args)
        result: Future[Any] = Future()
        if method == "reset_prefix_cache":
            with self._step_lock:
                result.set_result(self.scheduler.kv.forget_prefixes())
        else:
            result.set_exception(LoRAError(NO_LORA))
        return result

    def check_integrity(self) -> None:
        """Assert the invariants of an engine that is idle."""
        assert self._executor.is_idle or self.scheduler.has_work()
        self.scheduler.check_integrity(self._admission.waiting_ids())
        if self.loras is not None and not (self.scheduler.requests or self._grammars):
            self.loras.check_integrity()

    def shutdown(self) -> None:
        if self.loras is not None:
            self.loras.shutdown()
        self._grammars.close()
        self.runner.shutdown()

    def _record(self, stats: StepStats, computed: ComputedStep) -> None:
        """Add what the runner reports about a step to the statistics."""
        output = computed.output
        for phase, seconds in output.phase_seconds.items():
            stats.phase_seconds[phase] = stats.phase_seconds.get(phase, 0.0) + seconds
        stats.num_padded_tokens += output.num_padded_tokens
        if computed.batch.num_scheduled_tokens:
            self._compilation = (output.compiled_graphs, output.warm_up_seconds, output.fallback_operators)


def _check_features(config: EngineConfig, capabilities: RunnerCapabilities, device: str) -> None:
    """Raise ConfigError if the runner lacks a feature that the options enable."""
    if config.speculative is not None and not capabilities.verifies_drafts:
        raise ConfigError(f"speculative_config is set, but the runner on {device} cannot verify drafts")
    if config.scheduler.async_scheduling and not capabilities.launches_ahead:
        raise ConfigError(f"async_scheduling is set, but the runner on {device} does not launch steps ahead")
    if config.lora is not None and not (capabilities.lora and capabilities.mixed_batches):
        raise ConfigError(f"enable_lora is set, but the runner on {device} serves no LoRA adapters")


def _check_states(config: EngineConfig, spec: KVSpec, architecture: str) -> None:
    """Raise ConfigError if an option takes back computed tokens of a model with recurrent layers."""
    if not spec.bytes_per_state:
        return
    for name, value in (
        ("speculative_config", config.speculative),
        ("async_scheduling", config.scheduler.async_scheduling),
    ):
        if value:
            raise ConfigError(
                f"{name} is set, but {architecture} has recurrent layers, whose states cannot be taken back when a "
                f"token turns out wrong: leave {name} out"
            )


def _shortened(model_info: ModelInfo, max_tokens: int) -> ModelInfo:
    return replace(model_info, max_model_len=min(model_info.max_model_len, max_tokens))


def _ignore_wake() -> None:
    """Do nothing. The owner does not sleep: it calls `step` on its own schedule."""
