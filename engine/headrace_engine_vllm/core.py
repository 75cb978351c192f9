"""`VLLMCore`: the child's `Core` on vLLM's `InputProcessor` and `InprocClient`.

vLLM computes each step: its scheduler chooses requests, its model runner computes, its scheduler stores the tokens.
This module converts requests and outputs. It also does what vLLM leaves to its servers: limits of the queue, loading
of adapters, and reasons of failures.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.metrics.stats import SchedulerStats

from headrace_engine.core.lora_manager import LoadedLoRA, LoRAManager
from headrace_engine.core.outputs import EngineCoreOutput, EngineCoreOutputs, StepStats
from headrace_engine.core.request_queue import QueueLimits
from headrace_engine.core.stop_check import check_stop
from headrace_engine.core.tokenizer_source import TokenizerSource
from headrace_engine.errors import EngineFullError, LoRAError
from headrace_engine.options.capabilities import CapabilityChecks, ExactResume
from headrace_engine.requests.request import EngineCoreRequest, FinishReason, Request
from headrace_engine_vllm import description, probe, startup
from headrace_engine_vllm.adapters import LoadedAdapters
from headrace_engine_vllm.errors import memory_errors, refusal_of
from headrace_engine_vllm.extensions import statistics
from headrace_engine_vllm.grammars import Grammars
from headrace_engine_vllm.requests import HeldRequest, output_of, sampling_params

if TYPE_CHECKING:
    from headrace_engine.options.config import EngineConfig

_GRAMMAR_WAIT_SECONDS: Final = 0.02
_NO_BLOCKS: Final = 1 << 30
_NO_LORA: Final = "this engine serves no LoRA adapters: enable_lora is not set"


class VLLMCore:
    """vLLM's engine for one model.

    Raises:
        ConfigError, ModelLoadError: vLLM cannot serve the model with these options.
    """

    def __init__(self, config: "EngineConfig", version: str) -> None:
        self._config = config
        self._version = version
        self.wake: Callable[[], None] = lambda: None  # the child's loop sets it
        self._engine = startup.create_engine(config, version)
        self._client: Any = self._engine.engine_core
        self._scheduler = self._client.engine_core.scheduler
        self._tasks = self._engine.get_supported_tasks()
        self._num_blocks = self._engine.vllm_config.cache_config.num_gpu_blocks or 0
        self._last_stats = SchedulerStats()
        self.model_info = description.model_info(self._engine, config)
        self._claim("none")
        self._tokenizer = TokenizerSource(config, self.model_info)
        self._grammars = Grammars(self._tokenizer.create_grammar_compiler)
        self._eos_token_ids = frozenset(self.model_info.eos_token_ids)
        self._queue = QueueLimits(config.scheduler.max_num_queued_requests, config.scheduler.max_num_queued_tokens)
        self._running: dict[str, HeldRequest] = {}
        """Requests by Headrace's id."""
        self._ids: dict[str, str] = {}
        """vLLM's request id -> Headrace's."""
        self._answers: list[EngineCoreOutput] = []
        """Outputs that need no step, such as refusals."""
        self._adapters = LoadedAdapters(self._client, lambda: self.wake())
        self._loras = self._load_adapters()

    def warm_up(self) -> None:
        """Compute some requests of our own, and find out which requests can be resumed exactly."""
        self._claim(probe.exact_resume(self))

    def _claim(self, exact: ExactResume) -> None:
        self.capabilities = description.capabilities(self._engine, self._config, self._version, exact)
        self._checks = CapabilityChecks(self._config.engine, self.capabilities, self.model_info.eos_token_ids)

    # -- requests -------------------------------------------------------------------------------------------------

    def add_request(self, message: EngineCoreRequest) -> None:
        """Queue a request. If it is refused or already complete, the next step answers it."""
        if message.lora_request is None:
            if self._may_wait(message):
                self._add(message, None)
        elif self._loras is None:
            self._refuse(message, _NO_LORA)
        elif self._may_wait(message) and (lora := self._loras.take(message)) is not None:
            self._add(message, lora)

    def _may_wait(self, message: EngineCoreRequest) -> bool:
        if message.request_id in self._running:
            self._answers.append(_refusal(message, f"request id {message.request_id} is in use"))
            return False
        try:
            self._queue.enter(message.request_id, len(message.prompt_token_ids) + len(message.output_token_ids))
        except EngineFullError as error:
            self._answers.append(_refusal(message, str(error)))
            return False
        return True

    def _add(self, message: EngineCoreRequest, lora: LoadedLoRA | None) -> None:
        if message.output_token_ids:
            # an earlier attempt may have ended after the last token, before it reported the end
            reason, stop = check_stop(Request(message, _NO_BLOCKS), self.model_info.max_model_len)
            if reason is not None:
                self._queue.leave(message.request_id)
                answer = EngineCoreOutput(message.request_id, [], finish_reason=reason, stop_reason=stop)
                self._answers.append(answer)
                _release(lora)
                return
        # the client has checked this already, but a request over a limit would end vLLM
        problems = self._checks.problems(message.sampling_params, message.bad_words_token_ids)
        refusal = "; ".join(problems) or self._queue_in_vllm(message, lora)
        if refusal:
            _release(lora)
            self._refuse(message, refusal)

    def _queue_in_vllm(self, message: EngineCoreRequest, lora: LoadedLoRA | None) -> str | None:
        """Add the request to vLLM. Return the message with which vLLM refuses it, or None."""
        try:
            request = self._vllm_request(message, lora)
            vllm_id: str = request.request_id
            if message.output_token_ids:
                self._scheduler.emitted[vllm_id] = message.output_token_ids
            try:
                self._client.add_request(request)
            finally:
                self._scheduler.emitted.pop(vllm_id, None)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001  # the error concerns only this request: no step has begun
            return refusal_of(error)
        running = HeldRequest(message=message, vllm_id=vllm_id, lora=lora)
        running.theirs = self._scheduler.requests.get(vllm_id)
        self._running[message.request_id] = running
        self._ids[vllm_id] = message.request_id
        return None

    def _vllm_request(self, message: EngineCoreRequest, lora: LoadedLoRA | None) -> Any:
        """Return the request as vLLM's core takes it. vLLM's input processor checks it."""
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": message.prompt_token_ids}
        salt = message.cache_salt
        if lora is not None:  # vLLM identifies adapters by name and folder, which a new version may share
            salt = f"{salt}\0adapter {lora.version}"
        if salt:
            prompt["cache_salt"] = salt
        request = self._engine.input_processor.process_inputs(
            message.request_id,
            prompt,
            sampling_params(message, self._grammars.of(message)),
            supported_tasks=self._tasks,
            arrival_time=message.arrival_time or None,
            lora_request=self._adapters.of(lora.version) if lora is not None else None,
            priority=message.priority,
        )
        self._engine.input_processor.assign_request_id(request)
        return request

    def _refuse(self, message: EngineCoreRequest, sentence: str) -> None:
        self._queue.leave(message.request_id)
        self._answers.append(_refusal(message, sentence))

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        if self._loras is not None:
            self._loras.abort(request_ids)
        gone = []
        for request_id in request_ids:
            self._queue.leave(request_id)
            if request_id in self._running:
                gone.append(self._forget(request_id).vllm_id)
        self._client.abort_requests(gone)

    def _forget(self, request_id: str) -> HeldRequest:
        request = self._running.pop(request_id)
        del self._ids[request.vllm_id]
        _release(request.lora)
        return request

    # -- a step ---------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        if self._answers or self._adapters.has_tasks or (self._loras is not None and self._loras.may_be_ready):
            return True
        # a step also removes ended requests from vLLM's runner, and reads the results of steps in flight
        return bool(self._scheduler.has_requests() or self._client.engine_core.batch_queue)

    def step(self) -> EngineCoreOutputs:
        """Compute one step and return its outputs. Call only while `has_work()`."""
        started = time.perf_counter()
        self._adapters.run_tasks()
        if self._loras is not None and self._loras.may_be_ready:
            self._add_those_with_adapters(self._loras)
        stats = StepStats()
        outputs = self._step(stats)
        answers, self._answers = self._answers, []
        stats.step_seconds = time.perf_counter() - started
        return EngineCoreOutputs(outputs=answers + outputs, stats=stats)

    def _step(self, stats: StepStats) -> list[EngineCoreOutput]:
        with memory_errors():
            theirs = self._client.get_output()
        steps = self._scheduler.take_steps()
        stats.admitted_choice_ids = [*self._admitted(vllm_id for step in steps for vllm_id in step.new_ids)]
        statistics.add_scheduled(stats, steps)
        if theirs.scheduler_stats is not None:
            self._last_stats = theirs.scheduler_stats
            statistics.add_counts(stats, theirs.scheduler_stats)
        statistics.add_levels(stats, self._last_stats, self._num_blocks)
        if self._loras is not None:
            statistics.add_adapters(stats, self._scheduler.requests.values(), self._scheduler.running)
        outputs = [*self._take(theirs.outputs)]
        if not (outputs or stats.num_tokens or self._answers):
            self._scheduler.wait_for_grammars(_GRAMMAR_WAIT_SECONDS)
        return outputs

    def _admitted(self, vllm_ids: Iterable[str]) -> Iterable[str]:
        for vllm_id in vllm_ids:
            request = self._running.get(self._ids.get(vllm_id, ""))
            if request is not None and not request.is_admitted:  # runner v2 gets a preempted request as a new one
                request.is_admitted = True
                self._queue.leave(request.message.request_id)
                yield request.message.request_id

    def _take(self, outputs: Iterable[Any]) -> Iterable[EngineCoreOutput]:
        for theirs in outputs:
            request_id = self._ids.get(theirs.request_id)
            if request_id is None:
                continue  # the request was aborted
            output = output_of(self._running[request_id], theirs, self._eos_token_ids)
            if output.finish_reason is not None:
                self._queue.leave(request_id)
                self._forget(request_id)
            yield output

    # -- adapters and calls ---------------------------------------------------------------------------------------

    def _load_adapters(self) -> LoRAManager | None:
        lora = self._config.lora
        if lora is None:
            return None
        loras = LoRAManager(lora, self._adapters, lambda: self.wake())
        loras.preload(lora.preload)
        return loras

    def _add_those_with_adapters(self, loras: LoRAManager) -> None:
        for message, found in loras.ready():
            if isinstance(found, str):
                self._refuse(message, found)
            else:
                self._add(message, found)

    def call(self, method: str, *args: Any) -> "Future[Any]":
        """Call a method, as `EngineCore.call` does."""
        if method == "tokenizer":
            return self._tokenizer.describe()
        done: Future[Any] = Future()
        try:
            if method == "reset_prefix_cache":
                done.set_result(bool(self._client.reset_prefix_cache()))
            elif self._loras is None:
                raise LoRAError(_NO_LORA)
            else:
                return self._loras.call(method, *args)
        except Exception as error:  # noqa: BLE001  # the caller gets it
            done.set_exception(error)
        return done

    def check_integrity(self) -> None:
        assert not self._running and not self._ids, "requests have ended that are still known"
        assert not self._scheduler.emitted, "emitted tokens are left that no request has taken"
        assert not self._scheduler.requests, "vLLM has requests that nobody waits for"
        waiting = self._loras.waiting_ids() if self._loras is not None else []
        self._queue.check_integrity([], waiting)
        if self._loras is not None:
            self._loras.check_integrity()

    def shutdown(self) -> None:
        if self._loras is not None:
            self._loras.shutdown()
        self._client.shutdown()


def _refusal(message: EngineCoreRequest, sentence: str) -> EngineCoreOutput:
    return EngineCoreOutput(message.request_id, [], error=sentence, finish_reason=FinishReason.ERROR)


def _release(lora: "LoadedLoRA | Any") -> None:
    if lora is not None:
        lora.release()
