"""The step loop.

One step is three lines: the scheduler decides who computes how many tokens, the runner computes them, and the
scheduler takes the new tokens in. With `async_scheduling` the third line is for the step before: the device computes
this one meanwhile. Everything else in this package serves one of these three. Imports no torch.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar, cast

from headrace_engine.capabilities import EngineCapabilities
from headrace_engine.config import EngineConfig
from headrace_engine.core.grammar_preparation import GrammarPreparation
from headrace_engine.core.kv_cache_manager import KVCacheManager
from headrace_engine.core.lora_manager import LoRAManager
from headrace_engine.core.outputs import STEP_STATS, EngineCoreOutput, EngineCoreOutputs
from headrace_engine.core.runner_factory import load_tokenizer
from headrace_engine.core.scheduler import Scheduler
from headrace_engine.core.stop_check import check_stop
from headrace_engine.engine_args_checks import FITTING_LENGTH
from headrace_engine.errors import ConfigError, HeadraceEngineError, LoRAError, QueueFullError, raised_at
from headrace_engine.grammar import Grammar, GrammarCompiler, TokenizerDefinition
from headrace_engine.request import EngineCoreRequest, FinishReason, LoRAVersion, Request
from headrace_engine.runner.contracts import (
    DRAWS,
    Capabilities,
    KVSpec,
    LaunchedStep,
    LaunchingRunner,
    ModelRunner,
    StepBatch,
    StepOutput,
)
from headrace_engine.tokenizer_parts import TokenizerParts

logger = logging.getLogger(__name__)

T = TypeVar("T")

# With nothing to compute, a step waits so long for a grammar before it looks for new requests again.
_GRAMMAR_WAIT_SECONDS = 0.02


class EngineCore:
    """Scheduler and runner of one model.

    Raises:
        ModelLoadError: the model cannot be loaded.
        ConfigError: the KV memory does not hold a single request of `max_model_len` tokens.
    """

    def __init__(self, config: EngineConfig, runner: ModelRunner) -> None:
        self.runner = runner
        self.model_info = runner.load_model()
        if config.speculative is not None and not runner.capabilities().verifies_drafts:
            device = self.model_info.device
            raise ConfigError(f"speculative_config is set, but the runner on {device} cannot verify drafts")
        if config.scheduler.async_scheduling and not runner.capabilities().launches_ahead:
            device = self.model_info.device
            raise ConfigError(f"async_scheduling is set, but the runner on {device} does not launch steps ahead")
        self._runs_ahead = config.scheduler.async_scheduling
        self._in_flight: _InFlight | None = None
        self._compilation = (0, 0.0, 0)
        """What the runner said last of its graphs, their compilation, and operators that the device lacks."""
        spec = runner.kv_spec()
        num_blocks = _num_blocks(config, spec, self.model_info.max_model_len)
        if config.model.max_model_len == FITTING_LENGTH:
            most = (num_blocks - 1) * spec.block_size
            self.model_info = replace(self.model_info, max_model_len=min(self.model_info.max_model_len, most))
        runner.init_kv_cache(num_blocks)
        runner.warm_up()
        self.scheduler = Scheduler(
            config.scheduler,
            KVCacheManager(num_blocks, spec.block_size, enable_prefix_caching=config.cache.enable_prefix_caching),
            runner.capabilities(),
            self.model_info.max_model_len,
            config.speculative,
            max_loras=config.lora.max_loras if config.lora else 0,
        )
        self._config = config
        self._stepping = threading.Lock()
        """Held by a step, for calls that come from another thread."""
        self._grammars = GrammarPreparation(self._create_grammar_compiler)
        self._tokenizer: TokenizerParts | None = None
        """Kept from a door's call until the first grammar, which needs it, too."""
        self.wake: Callable[[], None] = _no_op_wake
        """Set by the caller that waits for `has_work()`. Called, from any thread, when that becomes true by itself."""
        self.loras = self._load_adapters(config, runner.capabilities())
        self._answers: list[EngineCoreOutput] = []
        """Outputs without a step: refusals, and ends of requests that were complete when they came."""

    @property
    def capabilities(self) -> EngineCapabilities:
        """Everything: what this engine does not have with a model or a device, it refuses at its start."""
        has_loras = self.loras is not None
        everything = EngineCapabilities.of_everything(draws=DRAWS, stats=STEP_STATS)
        return replace(everything, lora=has_loras, lora_hot_load=has_loras)

    def add_request(self, message: EngineCoreRequest) -> None:
        """Queue a request. One that is refused, or complete already, is answered by the next step."""
        if message.lora_request is None:
            self._add(message, None)
        elif self.loras is None:
            self._refuse(message, _NO_LORA)
        elif self._may_wait(message) and (lora := self.loras.take(message)) is not None:
            self._add(message, lora)

    def _add(self, message: EngineCoreRequest, lora: LoRAVersion | None) -> None:
        request = Request(message, self.scheduler.kv.block_size, lora)
        answer = EngineCoreOutput(request_id=request.request_id, new_token_ids=[])
        if message.output_token_ids:
            # An earlier attempt may have died after its last token, before it said that it was the last.
            answer.finish_reason, answer.stop_reason = check_stop(request, self.model_info.max_model_len)
        if answer.finish_reason is not None:
            self.scheduler.queue_limits.leave(_released(request).request_id)
            self._answers.append(answer)
        elif message.sampling_params.structured_outputs is None:
            self._admit(request)
        elif self._may_wait(message):
            self._grammars.add(request)

    def _may_wait(self, message: EngineCoreRequest) -> bool:
        """Count a request among those that wait, before it comes to the scheduler; False where it is refused."""
        try:
            limits = self.scheduler.queue_limits
            limits.enter(message.request_id, len(message.prompt_token_ids) + len(message.output_token_ids))
        except QueueFullError as error:
            self._refuse(message, str(error))
            return False
        return True

    def _admit(self, request: Request, grammar: Grammar | None = None) -> None:
        try:
            self.scheduler.add_request(request, grammar)
        except HeadraceEngineError as error:
            self._refuse(_released(request), str(error))

    def _admit_prepared(self) -> None:
        """Admit the requests whose grammars are compiled. Compilation goes on beside the steps of the others."""
        idle = not self._answers and not self.scheduler.has_work()
        for prepared in self._grammars.take(_GRAMMAR_WAIT_SECONDS if idle else 0.0):
            if prepared.error is None:
                self._admit(prepared.request, prepared.grammar)
            else:
                self._refuse(_released(prepared.request), prepared.error)

    def _refuse(self, message: EngineCoreRequest | Request, sentence: str) -> None:
        refusal = EngineCoreOutput(request_id=message.request_id, new_token_ids=[], error=sentence)
        refusal.finish_reason = FinishReason.ERROR
        if message.request_id not in self.scheduler.requests:  # else it is that one's place
            self.scheduler.queue_limits.leave(message.request_id)
        self._answers.append(refusal)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        if self.loras is not None:
            self.loras.abort(request_ids)
        for request in self._grammars.abort(request_ids):
            _released(request)
        for request_id in request_ids:
            self.scheduler.queue_limits.leave(request_id)
        self.scheduler.abort_requests(request_ids)

    def call(self, method: str, *args: Any) -> "Future[Any]":
        """Do something beside the step loop and answer; `args` and the answer are plain data. From any thread.

        `tokenizer`: the model's `TokenizerParts`.
        `reset_prefix_cache`: forget all blocks; False where requests run.
        `add_lora`, `remove_lora`, `list_loras`, `pin_lora`: see `LoRAManager`.
        """
        if method == "tokenizer":
            return self._describe_tokenizer()
        if method == "reset_prefix_cache":
            done: Future[Any] = Future()
            with self._stepping:
                done.set_result(self.scheduler.kv.pool.forget_all())
            return done
        if self.loras is None:
            refused: Future[Any] = Future()
            refused.set_exception(LoRAError(_NO_LORA))
            return refused
        return self.loras.call(method, *args)

    def has_work(self) -> bool:
        if self.loras is not None and self.loras.may_be_ready:
            return True
        return bool(self._answers or self._grammars) or self.scheduler.has_work()

    @property
    def is_prepared_for_grammars(self) -> bool:
        return self._grammars.is_loaded

    def prepare_for_grammars(self) -> None:
        """Read the vocabulary for grammars, once. For an idle moment: it holds up all threads."""
        self._grammars.load()

    def step(self) -> EngineCoreOutputs:
        """Compute one step and return its outputs. Call only while `has_work()`."""
        with self._stepping:
            return self._step()

    def _step(self) -> EngineCoreOutputs:
        if self.loras is not None and self.loras.may_be_ready:
            self._add_those_with_adapters(self.loras)
        started = time.perf_counter()
        if self._grammars:
            self._admit_prepared()
        batch = self.scheduler.schedule()
        scheduled = time.perf_counter()
        stats = self.scheduler.stats
        new_outputs: list[EngineCoreOutput] = []
        if self._runs_ahead:
            updating = self._launch(batch, new_outputs)
        else:
            output = self._run(batch, lambda: self.runner.execute_model(batch))
            updating = self._update(batch, output, None, new_outputs)
        for request, failed in self.scheduler.take_those_without_grammar():
            self._grammars.add(request, failed)
        stats.step_seconds = time.perf_counter() - started
        stats.phase_seconds = {"schedule": scheduled - started, **stats.phase_seconds, "update": updating}
        stats.compiled_graphs, stats.warm_up_seconds, stats.fallback_operators = self._compilation
        answers, self._answers = self._answers, []
        return EngineCoreOutputs(outputs=answers + new_outputs, stats=stats)

    def _launch(self, batch: StepBatch, new_outputs: list[EngineCoreOutput]) -> float:
        """Give the device a step, and take in the one before it; this one, too, where the next has to wait for it.

        Returns the seconds that the scheduler took for the results.
        """
        requests = self.scheduler.expect_tokens(batch)
        runner = cast(LaunchingRunner, self.runner)
        before = self._in_flight
        launched = _InFlight(batch, requests, self._run(batch, lambda: runner.launch_model(batch)))
        self._in_flight = launched
        seconds = self._take_in(before, new_outputs) if before is not None else 0.0
        if launched.step.is_complete:
            self._in_flight = None
            seconds += self._take_in(launched, new_outputs)
        return seconds

    def _take_in(self, launched: "_InFlight", new_outputs: list[EngineCoreOutput]) -> float:
        output = self._run(launched.batch, launched.step.result)
        if output.void_request_ids and self._in_flight is not None:
            self._in_flight.forget(output.void_request_ids)
        return self._update(launched.batch, output, launched.requests, new_outputs)

    def _run(self, batch: StepBatch, compute: Callable[[], T]) -> T:
        try:
            return compute()
        except Exception as error:
            logger.error("the runner failed on a step of %s at\n%s", _describe(batch), raised_at(error))
            raise

    def _update(
        self, batch: StepBatch, output: StepOutput, requests: list[Request] | None, new_outputs: list[EngineCoreOutput]
    ) -> float:
        """Take a step's results in; returns the seconds that it took."""
        executed = time.perf_counter()
        new_outputs += self.scheduler.update_from_output(batch, output, requests)
        stats = self.scheduler.stats
        for phase, seconds in output.phase_seconds.items():
            stats.phase_seconds[phase] = stats.phase_seconds.get(phase, 0.0) + seconds
        stats.num_padded_tokens += output.num_padded_tokens
        if batch.num_scheduled_tokens:
            self._compilation = (output.compiled_graphs, output.warm_up_seconds, output.fallback_operators)
        return time.perf_counter() - executed

    def _load_adapters(self, config: EngineConfig, capabilities: Capabilities) -> LoRAManager | None:
        if config.lora is None:
            return None
        if not (capabilities.lora and capabilities.mixed_batches):
            raise ConfigError("enable_lora is set, but this device's runner serves no LoRA adapters")
        loras = LoRAManager(config.lora, self.runner, lambda: self.wake())
        loras.preload(config.lora.preload)
        return loras

    def _add_those_with_adapters(self, loras: LoRAManager) -> None:
        for message, found in loras.ready():
            if isinstance(found, str):
                self._refuse(message, found)
            else:
                self._add(message, found)

    def check_integrity(self) -> None:
        assert self._in_flight is None or self.scheduler.has_work()
        waiting = [*self._grammars.waiting_ids(), *(self.loras.waiting_ids() if self.loras is not None else ())]
        self.scheduler.check_integrity(waiting)
        if self.loras is not None and not (self.scheduler.requests or self._grammars):
            self.loras.check_integrity()

    def shutdown(self) -> None:
        if self.loras is not None:
            self.loras.shutdown()
        self._grammars.close()
        self.runner.shutdown()

    def _describe_tokenizer(self) -> "Future[Any]":
        described: Future[Any] = Future()
        try:
            parts = load_tokenizer(self._config)
        except HeadraceEngineError as error:
            described.set_exception(error)
        else:
            if not self._grammars.is_loaded:
                self._tokenizer = parts
            described.set_result(asdict(parts))
        return described

    def _create_grammar_compiler(self) -> GrammarCompiler:
        parts, self._tokenizer = self._tokenizer or load_tokenizer(self._config), None
        return GrammarCompiler(
            TokenizerDefinition(
                tokenizer_json=parts.tokenizer_json,
                vocab_size=self.model_info.vocab_size,
                eos_token_ids=self.model_info.with_end_token(parts.eos_token_id).eos_token_ids,
            )
        )


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step on the device, and the requests in it. A later request with the same id is not one of them."""

    batch: StepBatch
    requests: list[Request]
    step: LaunchedStep

    def forget(self, request_ids: Iterable[str]) -> None:
        """The step draws nothing for these requests, and what it computed for them is to be computed again."""
        void = set(request_ids)
        for request in self.requests:
            if request.request_id in void:
                request.num_computed_tokens -= 1
                request.num_pending_tokens -= 1


def _released(request: Request) -> Request:
    """The request, which no longer holds its adapter."""
    if request.lora is not None:
        request.lora.release()
    return request


_NO_LORA = "this engine serves no LoRA adapters: enable_lora is not set"


def _no_op_wake() -> None:
    """For a core whose owner calls `step` as it likes."""


def _num_blocks(config: EngineConfig, spec: KVSpec, max_model_len: int) -> int:
    needed = -(-max_model_len // spec.block_size) + 1  # one request at full length, and the null block
    if config.cache.num_blocks is not None:
        available, source = config.cache.num_blocks, "num_blocks"
    else:
        memory = config.cache.kv_cache_memory
        available = (memory if memory is not None else spec.default_memory) // spec.bytes_per_block
        source = "the default of free memory" if memory is None else f"kv_cache_memory={memory}"
    if config.model.max_model_len == FITTING_LENGTH:
        needed = min(needed, max(available, 2))
    if available < needed:
        raise ConfigError(
            f"one request of max_model_len={max_model_len} tokens needs {needed} KV blocks "
            f"({needed * spec.bytes_per_block / 2**20:.0f} MiB) but {source} gives {available}: "
            "give more KV memory or lower max_model_len"
        )
    enough = (needed - 1) * config.scheduler.max_num_seqs + 1
    wanted = min(available, enough) if config.cache.num_blocks is None else available
    if spec.available_memory is not None and wanted * spec.bytes_per_block > spec.available_memory:
        raise ConfigError(
            f"{source} asks for {wanted * spec.bytes_per_block / 2**20:.0f} MiB of KV memory, "
            f"but only {spec.available_memory / 2**20:.0f} MiB are free"
        )
    logger.info("KV cache: %d blocks of %d tokens", wanted, spec.block_size)
    return wanted


def _describe(batch: StepBatch) -> str:
    """What a batch held, without any token: for the log of a failed step."""
    shape = ", ".join(f"{request_id}:{count}" for request_id, count in batch.num_scheduled_tokens.items())
    num_new = len(batch.new_requests)
    return f"{len(batch.num_scheduled_tokens)} requests ({num_new} new), {batch.num_tokens} tokens: {shape}"
