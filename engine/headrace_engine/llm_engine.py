"""LLMEngine: the engine step by step, in the caller's thread."""

import contextlib
from collections.abc import Sequence
from typing import Any

from headrace_engine.config import EngineArgs, EngineConfig
from headrace_engine.core.client import CoreClient, InProcessCore
from headrace_engine.core.process import EngineCoreProcess
from headrace_engine.errors import DuplicateRequestError, EngineDeadError, LoRACapacityError
from headrace_engine.input_processor import ChatMessage, InputProcessor, ProcessedRequest, Prompt
from headrace_engine.logits_processor import load_logits_processors
from headrace_engine.lora_request import LoRARequest
from headrace_engine.output_processor import OutputProcessor
from headrace_engine.outputs import RequestOutput
from headrace_engine.runner.contracts import ModelInfo
from headrace_engine.sampling_params import SamplingParams
from headrace_engine.tokenizer import ModelTokenizer, create_tokenizer
from headrace_engine.tokenizer_parts import TokenizerParts


class LLMEngine:
    """Add requests, call `step()` while there are unfinished ones, read the outputs.

    Not thread-safe. Close it (or use it as a context manager) to end a core in a child process.
    """

    def __init__(self, config: EngineConfig, *, core_in_process: bool = True) -> None:
        self._core = start_core(config, in_process=core_in_process)
        self.tokenizer = fetch_tokenizer(config, self._core)
        self._input_processor = create_input_processor(config, self._core.model_info, self.tokenizer)
        self.model_info = self._input_processor.model_info
        self._output_processor = OutputProcessor(self.tokenizer)
        self._arrivals = 0
        self._loras: set[LoRARequest] = set()
        """Adapters that are known to be good."""

    @classmethod
    def from_engine_args(cls, args: EngineArgs, *, core_in_process: bool = True) -> "LLMEngine":
        return cls(args.create_engine_config(), core_in_process=core_in_process)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: the request is wrong; nothing was queued.
            LoRAError: its adapter cannot be served; nothing was queued.
            DuplicateRequestError: the id is in use.
        """
        self._check_id(request_id)
        self._add(
            self._input_processor.process(
                request_id,
                prompt,
                params or self.get_default_sampling_params(),
                priority=priority,
                arrival_time=self._next_arrival(),
                lora_request=lora_request,
            )
        )

    def add_chat_request(
        self,
        request_id: str,
        messages: Sequence[ChatMessage],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Queue a request whose prompt is a conversation; errors as `add_request`."""
        self._check_id(request_id)
        self._add(
            self._input_processor.process_chat(
                request_id,
                messages,
                params or self.get_default_sampling_params(),
                priority=priority,
                arrival_time=self._next_arrival(),
                lora_request=lora_request,
            )
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without parameters gets: those of `generation_config`."""
        return SamplingParams(**self.model_info.default_sampling_params)

    def tokenize(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt in any form. Raises InvalidRequestError."""
        return self._input_processor.tokenize(prompt)[1]

    def step(self) -> list[RequestOutput]:
        """Wait for one step of the core and return the outputs of the requests that it moved.

        Raises:
            EngineDeadError: the core failed or was closed.
        """
        if not self.has_unfinished_requests():
            return []
        outputs = self._core.get_outputs()
        if outputs is None:
            raise EngineDeadError("the engine was closed before its requests were finished")
        processed = self._output_processor.process(outputs.outputs)
        if processed.finished_choice_ids:
            self._core.abort_requests(processed.finished_choice_ids)
        return processed.request_outputs

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; returns its last output, None when it is not (or no longer) here."""
        aborted = self._output_processor.abort(request_id)
        if aborted is None:
            return None
        output, choice_ids = aborted
        self._core.abort_requests(choice_ids)
        return output

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter, so that requests may name it without its path. One that is loaded is kept as it is, but
        read again with `load_inplace`; requests that run go on with what they began with.

        Raises:
            LoRAError: the adapter cannot be served; all that is wrong with it is named.
        """
        added: bool = self._call("add_lora", lora_request.to_wire())
        self._loras.add(lora_request)
        return added

    def remove_lora(self, lora_id: int) -> bool:
        """Unload the adapter with this `lora_int_id`; requests that use it run to their end. False: not loaded."""
        self._loras = {known for known in self._loras if known.lora_int_id != lora_id}
        removed: bool = self._call("remove_lora", lora_id)
        return removed

    def list_loras(self) -> set[int]:
        """The `lora_int_id`s of all loaded adapters."""
        return set(self._call("list_loras"))

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter loaded whatever others are needed. False: not loaded."""
        pinned: bool = self._call("pin_lora", lora_id)
        return pinned

    def _call(self, method: str, *args: Any) -> Any:
        answer = self._core.call(method, *args)
        self._core.wait(answer)
        return answer.result()

    def has_unfinished_requests(self) -> bool:
        return len(self._output_processor) > 0

    def get_num_unfinished_requests(self) -> int:
        return len(self._output_processor)

    def close(self) -> None:
        self._input_processor.close()
        self._core.shutdown()
        self._core.close()

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_id(self, request_id: str) -> None:
        if request_id in self._output_processor:
            raise DuplicateRequestError(f"request {request_id} is in the engine already")

    def _add(self, request: ProcessedRequest) -> None:
        lora_request = request.choices[0].lora_request
        if lora_request is not None and lora_request not in self._loras:
            # Here its mistakes can be told. Where it has no room now, or is dropped later, the core loads it in time.
            with contextlib.suppress(LoRACapacityError):
                self.add_lora(lora_request)
        self._output_processor.add_request(request)
        for choice in request.choices:
            self._core.add_request(choice)

    def _next_arrival(self) -> float:
        self._arrivals += 1
        return float(self._arrivals)


def create_input_processor(config: EngineConfig, model_info: ModelInfo, tokenizer: ModelTokenizer) -> InputProcessor:
    """The door that fits a core made from this config."""
    return InputProcessor(
        model_info,
        tokenizer,
        max_logprobs=config.model.max_logprobs,
        logits_processors=load_logits_processors(config.model.logits_processors),
    )


def fetch_tokenizer(config: EngineConfig, core: CoreClient) -> ModelTokenizer:
    """The tokenizer of the core's model. Raises ModelLoadError, and ends the core: it has none that can be used."""
    try:
        answer = core.call("tokenizer")
        core.wait(answer)
        parts = TokenizerParts(**answer.result())
        return create_tokenizer(config.model.model, parts, trust_remote_code=config.model.trust_remote_code)
    except BaseException:
        core.shutdown()
        core.close()
        raise


def start_core(config: EngineConfig, *, in_process: bool) -> CoreClient:
    """A core with its model loaded, here or in a child process.

    Raises:
        ModelLoadError, ConfigError, EngineDeadError: it could not start.
    """
    if in_process:
        return InProcessCore(config)
    process = EngineCoreProcess(config)
    try:
        process.wait_ready()
    except BaseException:
        process.kill()
        process.close()
        raise
    return process
