"""LLMEngine: the engine step by step, in the caller's thread."""

import contextlib
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

from headrace_engine import default_model
from headrace_engine.chat import ChatOptions
from headrace_engine.config import EngineConfig
from headrace_engine.core.core_client import CoreClient, InProcessCore
from headrace_engine.core.process import EngineCoreProcess
from headrace_engine.engine_args import EngineArgs
from headrace_engine.engine_metrics import EngineMetrics, Metric
from headrace_engine.engine_names import OWN_ENGINE
from headrace_engine.errors import (
    ConfigError,
    DuplicateRequestError,
    EngineDeadError,
    InvalidRequestError,
    LoRACapacityError,
)
from headrace_engine.input_processor import ChatMessage, InputProcessor, ProcessedRequest, Prompt
from headrace_engine.logits_processor import load_logits_processors
from headrace_engine.lora_request import LoRARequest
from headrace_engine.output_processor import OutputProcessor
from headrace_engine.outputs import RequestOutput
from headrace_engine.plain_values import RequestId, plain, request_id_of, request_ids_of, shown
from headrace_engine.runner.contracts import ModelInfo
from headrace_engine.sampling_checks import number
from headrace_engine.sampling_params import SamplingParams
from headrace_engine.tokenizer import ModelTokenizer, NoTokenizer, create_tokenizer
from headrace_engine.tokenizer_parts import TokenizerParts
from headrace_engine.vllm_names import missing_attribute, refuse_arguments


class LLMEngine:
    """Add requests, call `step()` while there are unfinished ones, read the outputs.

    Not thread-safe. Close it (or use it as a context manager) to end a core in a child process.
    """

    tokenizer: ModelTokenizer

    def __init__(self, config: EngineConfig, *, core_in_process: bool = True) -> None:
        self._config = config
        self._core = start_core(config, in_process=core_in_process)
        self.tokenizer = fetch_tokenizer(config, self._core)
        self._input_processor = create_input_processor(config, self._core, self.tokenizer)
        self.model_info = self._input_processor.model_info
        self._output_processor = OutputProcessor(self.tokenizer)
        self._metrics = EngineMetrics(config.model.model, self._core.capabilities.stats)
        self._arrivals = 0
        self._loras: set[LoRARequest] = set()
        """Adapters that are known to be good."""

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineArgs, *, core_in_process: bool = True, **unsupported: Any
    ) -> "LLMEngine":
        """Load the model; errors as `LLM`."""
        refuse_arguments(unsupported)
        return cls(config_of(engine_args), core_in_process=core_in_process)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute("LLMEngine", name)

    def add_request(
        self,
        request_id: RequestId,
        prompt: Prompt,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        *,
        priority: int | None = None,
        **unsupported: Any,
    ) -> str:
        """Queue a request; returns its id as text, which its outputs bear.

        Args:
            arrival_time: orders requests of one priority; give it for all of them or for none.
            priority: 0 is served first, where the engine was made with `scheduling_policy="priority"`.

        Raises:
            InvalidRequestError: the request is wrong; nothing was queued.
            LoRAError: its adapter cannot be served; nothing was queued.
            DuplicateRequestError: the id is in use.
        """
        refuse_arguments(unsupported)
        name = self._new_id(request_id)
        self._add(
            self._input_processor.process(
                name,
                prompt,
                self.get_default_sampling_params() if params is None else params,
                priority=priority_of(priority),
                arrival_time=self._arrival(arrival_time),
                lora_request=lora_request,
            )
        )
        return name

    def add_chat_request(
        self,
        request_id: RequestId,
        messages: Sequence[ChatMessage],
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        *,
        priority: int | None = None,
        **chat_options: Any,
    ) -> str:
        """Queue a request whose prompt is a conversation; as `add_request`.

        Args:
            chat_options: those of `ChatOptions`.
        """
        name = self._new_id(request_id)
        self._add(
            self._input_processor.process_chat(
                name,
                messages,
                self.get_default_sampling_params() if params is None else params,
                priority=priority_of(priority),
                arrival_time=self._arrival(arrival_time),
                lora_request=lora_request,
                chat_options=ChatOptions.from_optional(**chat_options),
            )
        )
        return name

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without parameters gets: those of `generation_config`."""
        return default_params(self.model_info)

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
        processed = self._output_processor.process(outputs.outputs, stats=outputs.stats)
        num_tokens = sum(len(output.new_token_ids) for output in outputs.outputs)
        self._metrics.observe(outputs.stats, num_tokens, processed.request_outputs)
        if processed.finished_choice_ids:
            self._core.abort_requests(processed.finished_choice_ids)
        return processed.request_outputs

    def abort(self, request_id: RequestId) -> RequestOutput | None:
        """End a request now; returns its last output, None when it is not (or no longer) here."""
        aborted = self._output_processor.abort(request_id_of(request_id))
        if aborted is None:
            return None
        output, choice_ids = aborted
        self._core.abort_requests(choice_ids)
        return output

    def abort_request(self, request_ids: RequestId | Iterable[RequestId], **unsupported: Any) -> None:
        """End several requests now. Those that are not here are ignored."""
        refuse_arguments(unsupported)
        for request_id in request_ids_of(request_ids):
            self.abort(request_id)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget what the prefix cache holds. False: requests run, and nothing was forgotten."""
        refuse_arguments({"reset_running_requests": reset_running_requests, "reset_connector": reset_connector})
        done: bool = self._call("reset_prefix_cache")
        return done

    def get_tokenizer(self) -> Any:
        """The model's tokenizer as transformers has it."""
        return self._whole_tokenizer

    @cached_property
    def _whole_tokenizer(self) -> Any:
        return read_whole_tokenizer(self._config)

    def get_metrics(self) -> list[Metric]:
        """Counts and levels since the engine was made, up to the last step."""
        return self._metrics.snapshot(idle=not self.has_unfinished_requests())

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter, so that requests may name it without its path. One that is loaded is kept as it is, but
        read again with `load_inplace`; requests that run go on with what they began with.

        Raises:
            LoRAError: the adapter cannot be served; all that is wrong with it is named.
        """
        check_adapter(lora_request)
        added: bool = self._call("add_lora", lora_request.to_wire())
        self._loras.add(lora_request)
        return added

    def remove_lora(self, lora_id: int) -> bool:
        """Unload the adapter with this `lora_int_id`; requests that use it run to their end. False: not loaded."""
        lora_id = adapter_id(lora_id)
        self._loras = {known for known in self._loras if known.lora_int_id != lora_id}
        removed: bool = self._call("remove_lora", lora_id)
        return removed

    def list_loras(self) -> set[int]:
        """The `lora_int_id`s of all loaded adapters."""
        return set(self._call("list_loras"))

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter loaded whatever others are needed. False: not loaded."""
        pinned: bool = self._call("pin_lora", adapter_id(lora_id))
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
        """End the core; requests that are here get no more outputs."""
        self._input_processor.close()
        self._core.shutdown()
        self._core.close()

    def shutdown(self) -> None:
        """As `close`."""
        self.close()

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _new_id(self, request_id: RequestId) -> str:
        name = request_id_of(request_id)
        if name in self._output_processor:
            raise DuplicateRequestError(f"request {name} is in the engine already")
        return name

    def _add(self, request: ProcessedRequest) -> None:
        lora_request = request.choices[0].lora_request
        if lora_request is not None and lora_request not in self._loras:
            # Here its mistakes can be told. Where it has no room now, or is dropped later, the core loads it in time.
            with contextlib.suppress(LoRACapacityError):
                self.add_lora(lora_request)
        self._output_processor.add_request(request)
        for choice in request.choices:
            self._core.add_request(choice)

    def _arrival(self, given: float | None) -> float:
        if given is not None:
            given = plain(given)
            problems = number("arrival_time", given, -math.inf, math.inf)
            if problems:
                raise InvalidRequestError(problems)
            return float(given)
        self._arrivals += 1
        return float(self._arrivals)


def config_of(args: EngineArgs) -> EngineConfig:
    """The options of an engine, with the folder of the default model where it is asked for by its name.

    Raises:
        ConfigError: an option is wrong.
        ModelFetchError: the default model could not be fetched.
    """
    check_engine_args(args)
    config = args.create_engine_config()
    config.model.model = str(default_model.resolve(config.model.model, config.model.dtype))
    return config


def check_engine_args(args: object) -> None:
    """Raises ConfigError: these are no options of an engine."""
    if not isinstance(args, EngineArgs):
        raise ConfigError(f"engine_args is a {type(args).__name__}, expected EngineArgs")


def default_params(model_info: ModelInfo) -> SamplingParams:
    """The parameters of a request that gives none."""
    return SamplingParams(**model_info.default_sampling_params)


def priority_of(given: int | None) -> int:
    """A priority, None standing for 0; what is no number is refused later."""
    number: int = plain(given)
    return 0 if number is None else number


def check_adapter(lora_request: object) -> None:
    """Raises InvalidRequestError: it is no LoRARequest."""
    if not isinstance(lora_request, LoRARequest):
        raise InvalidRequestError(f"lora_request is a {type(lora_request).__name__}, expected LoRARequest")


def adapter_id(given: int) -> int:
    """Raises InvalidRequestError: it is no `lora_int_id`."""
    number: int = plain(given)
    if type(number) is not int or not 0 <= number < 2**63:
        raise InvalidRequestError(f"lora_id is {shown(given)}, expected the lora_int_id of an adapter")
    return number


def read_whole_tokenizer(config: EngineConfig) -> Any:
    """The tokenizer as transformers has it. Raises ConfigError, ModelLoadError."""
    if config.model.skip_tokenizer_init:
        raise ConfigError("the engine was made with skip_tokenizer_init, and has no tokenizer")
    return import_module("headrace_engine.tokenizer_loader").read_tokenizer_of(config.model)


def create_input_processor(config: EngineConfig, core: CoreClient, tokenizer: ModelTokenizer) -> InputProcessor:
    """The door that fits a core made from this config; it refuses a text that is far too long without tokenising it."""
    tokenizer.refuse_longer_than(core.model_info.max_model_len)
    return InputProcessor(
        core.model_info,
        tokenizer,
        max_logprobs=config.model.max_logprobs,
        logits_processors=load_logits_processors(config.model.logits_processors),
        seed=config.model.seed,
        engine=config.engine,
        capabilities=core.capabilities,
    )


def fetch_tokenizer(config: EngineConfig, core: CoreClient) -> ModelTokenizer:
    """The tokenizer of the core's model. Raises ModelLoadError, and ends the core: it has none that can be used."""
    if config.model.skip_tokenizer_init:
        return NoTokenizer()
    try:
        answer = core.call("tokenizer")
        core.wait(answer)
        parts = TokenizerParts(**answer.result())
        source, revision = config.model.tokenizer_source
        return create_tokenizer(source, parts, trust_remote_code=config.model.trust_remote_code, revision=revision)
    except BaseException:
        core.shutdown()
        core.close()
        raise


def start_core(config: EngineConfig, *, in_process: bool) -> CoreClient:
    """A core with its model loaded, here or in a child process: another engine, or interpreter, always has a child.

    Raises:
        ModelLoadError, ConfigError, EngineDeadError: it could not start.
    """
    if in_process and config.engine == OWN_ENGINE and config.engine_python is None:
        return InProcessCore(config)
    process = EngineCoreProcess(config)
    try:
        process.wait_ready()
    except BaseException:
        process.kill()
        process.close()
        raise
    return process
