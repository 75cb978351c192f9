"""LLMEngine: the engine step by step, in the thread of the caller."""

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from headrace_engine.api.input_processor import ChatMessage, InputProcessor, ProcessedRequest, Prompt
from headrace_engine.api.metrics import EngineMetrics, Metric
from headrace_engine.api.output_processor import OutputProcessor
from headrace_engine.checkpoints import default_model
from headrace_engine.core.core_client import CoreClient, InProcessCore
from headrace_engine.core.process import EngineCoreProcess
from headrace_engine.errors import (
    ConfigError,
    DuplicateRequestError,
    EngineDeadError,
    InvalidRequestError,
    LoRACapacityError,
)
from headrace_engine.options.config import OWN_ENGINE, EngineConfig
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.options.logits_processor import load_logits_processors
from headrace_engine.plain_values import RequestId, request_id_of, request_ids_of, shown
from headrace_engine.requests.lora_request import LoRARequest
from headrace_engine.requests.outputs import RequestOutput
from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.runner.contracts import ModelInfo
from headrace_engine.text.chat import ChatOptions
from headrace_engine.text.tokenizer import ModelTokenizer, NoTokenizer
from headrace_engine.text.tokenizer_factory import create_tokenizer
from headrace_engine.text.tokenizer_parts import TokenizerParts
from headrace_engine.vllm_names import missing_attribute, refuse_arguments
from headrace_wire.rules import Number
from headrace_wire.values import plain


class LLMEngine:
    """Add requests, call `step()` while there are unfinished ones, and read the outputs.

    Not thread-safe. Close it, or use it as a context manager, to end a core in a child process.
    """

    tokenizer: ModelTokenizer

    def __init__(self, config: EngineConfig, *, core_in_process: bool = True) -> None:
        self._config = config
        self._core = start_core(config, in_process=core_in_process)
        self.tokenizer = fetch_tokenizer(config, self._core)
        self.input_processor = create_input_processor(config, self._core, self.tokenizer)
        self.model_info = self.input_processor.model_info
        self._output_processor = OutputProcessor(self.tokenizer)
        self._metrics = EngineMetrics(config.model.model, self._core.capabilities.stats)
        self._arrivals = 0
        self._loras: set[LoRARequest] = set()
        """Adapters that have been loaded successfully before."""

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineArgs, *, core_in_process: bool = True, **unsupported: Any
    ) -> "LLMEngine":
        """Load the model. Raises the same errors as `LLM`."""
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
        """Queue a request. Return its id as text, as in the outputs.

        Args:
            arrival_time: orders requests of the same priority. Give it for all requests or for none.
            priority: the lowest number is served first, if the engine has `scheduling_policy="priority"`.

        Raises:
            InvalidRequestError: the request is invalid. Nothing was queued.
            LoRAError: its adapter cannot be served. Nothing was queued.
            DuplicateRequestError: the id is in use.
        """
        refuse_arguments(unsupported)
        process = partial(self.input_processor.process, prompt=prompt)
        return self._queue(request_id, params, arrival_time, lora_request, priority, process)

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
        """Queue a request whose prompt is a conversation, as `add_request` does.

        Args:
            chat_options: the fields of `ChatOptions`.
        """

        def process(request_id: str, **values: Any) -> ProcessedRequest:
            options = ChatOptions.from_optional(**chat_options)
            return self.input_processor.process_chat(request_id, messages, chat_options=options, **values)

        return self._queue(request_id, params, arrival_time, lora_request, priority, process)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of requests that give none. `generation_config` determines them."""
        return default_params(self.model_info)

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt in any form. Raises InvalidRequestError."""
        return self.input_processor.tokenize(prompt)[1]

    def step(self) -> list[RequestOutput]:
        """Wait for one step of the core and return the outputs of its requests.

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
        """Abort a request. Return its last output, or None if it is unknown or finished."""
        aborted = self._output_processor.abort(request_id_of(request_id))
        if aborted is None:
            return None
        output, choice_ids = aborted
        self._core.abort_requests(choice_ids)
        return output

    def abort_request(self, request_ids: RequestId | Iterable[RequestId], **unsupported: Any) -> None:
        """Abort requests. Unknown ids are ignored."""
        refuse_arguments(unsupported)
        for request_id in request_ids_of(request_ids):
            self.abort(request_id)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Clear the prefix cache. Return False, and keep it, if requests run."""
        refuse_arguments({"reset_running_requests": reset_running_requests, "reset_connector": reset_connector})
        return bool(self._call("reset_prefix_cache"))

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of the model as an object of transformers."""
        return self._whole_tokenizer

    @cached_property
    def _whole_tokenizer(self) -> Any:
        return read_whole_tokenizer(self._config)

    def get_metrics(self) -> list[Metric]:
        """Return the metrics since the start of the engine, up to the last step."""
        return self._metrics.snapshot(idle=not self.has_unfinished_requests())

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter, so that requests may name it without its path.

        A loaded adapter is kept, unless `load_inplace` is set: then it is read again. Running requests continue with
        the version that they started with.

        Raises:
            LoRAError: the adapter cannot be served. The error names all problems.
        """
        check_adapter(lora_request)
        added: bool = self._call("add_lora", lora_request.to_wire())
        self._loras.add(lora_request)
        return added

    def remove_lora(self, lora_id: int) -> bool:
        """Unload the adapter with this `lora_int_id`. Requests that use it continue. Return False if not loaded."""
        lora_id = adapter_id(lora_id)
        self._loras = {known for known in self._loras if known.lora_int_id != lora_id}
        return bool(self._call("remove_lora", lora_id))

    def list_loras(self) -> set[int]:
        """Return the `lora_int_id`s of all loaded adapters."""
        return set(self._call("list_loras"))

    def pin_lora(self, lora_id: int) -> bool:
        """Never evict an adapter to make room for others. Return False if it is not loaded."""
        return bool(self._call("pin_lora", adapter_id(lora_id)))

    def _call(self, method: str, *args: Any) -> Any:
        answer = self._core.call(method, *args)
        self._core.wait(answer)
        return answer.result()

    def has_unfinished_requests(self) -> bool:
        return len(self._output_processor) > 0

    def get_num_unfinished_requests(self) -> int:
        return len(self._output_processor)

    def close(self) -> None:
        """Shut down the core. Unfinished requests get no more outputs."""
        self.input_processor.close()
        self._core.shutdown()
        self._core.close()

    shutdown = close

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _queue(
        self,
        request_id: RequestId,
        params: SamplingParams | None,
        arrival_time: float | None,
        lora_request: LoRARequest | None,
        priority: int | None,
        process: Callable[..., ProcessedRequest],
    ) -> str:
        name = request_id_of(request_id)
        if name in self._output_processor:
            raise DuplicateRequestError(f"request {name} is in the engine already")
        request = process(
            name,
            params=self.get_default_sampling_params() if params is None else params,
            priority=priority_of(priority),
            arrival_time=self._arrival(arrival_time),
            lora_request=lora_request,
        )
        self._add(request)
        return name

    def _add(self, request: ProcessedRequest) -> None:
        lora_request = request.choices[0].lora_request
        if lora_request is not None and lora_request not in self._loras:
            # Load the adapter now, to report its problems to the caller. If there is no room, or if the adapter is
            # evicted later, the core loads it when a request needs it.
            with contextlib.suppress(LoRACapacityError):
                self.add_lora(lora_request)
        self._output_processor.add_request(request)
        for choice in request.choices:
            self._core.add_request(choice)

    def _arrival(self, given: float | None) -> float:
        if given is not None:
            given = plain(given)
            if problem := Number(-math.inf).problem("arrival_time", given):
                raise InvalidRequestError(problem)
            return float(given)
        self._arrivals += 1
        return float(self._arrivals)


def config_of(args: EngineArgs) -> EngineConfig:
    """Return the configuration of an engine. The name of the default model becomes its folder.

    Raises:
        ConfigError: an option is wrong.
        ModelFetchError: the default model could not be downloaded.
    """
    check_engine_args(args)
    config = args.create_engine_config()
    config.model.model = str(default_model.resolve(config.model.model, config.model.dtype, config.engine_python))
    return config


def check_engine_args(args: object) -> None:
    """Raise ConfigError if the argument is not `EngineArgs`."""
    if not isinstance(args, EngineArgs):
        raise ConfigError(f"engine_args must be EngineArgs, got a {type(args).__name__}")


def default_params(model_info: ModelInfo) -> SamplingParams:
    """Return the sampling parameters of requests that give none."""
    return SamplingParams(**model_info.default_sampling_params)


def priority_of(given: int | None) -> int:
    """Return a priority, 0 for None. An invalid value is refused later."""
    number: int = plain(given)
    return 0 if number is None else number


def check_adapter(lora_request: object) -> None:
    """Raise InvalidRequestError if the value is not a LoRARequest."""
    if not isinstance(lora_request, LoRARequest):
        raise InvalidRequestError(f"lora_request must be LoRARequest, got a {type(lora_request).__name__}")


def adapter_id(given: int) -> int:
    """Raise InvalidRequestError if the value is not a `lora_int_id`."""
    number: int = plain(given)
    if type(number) is not int or not 0 <= number < 2**63:
        raise InvalidRequestError(f"lora_id must be the lora_int_id of an adapter, got {shown(given)}")
    return number


def read_whole_tokenizer(config: EngineConfig) -> Any:
    """Return the tokenizer as an object of transformers. Raises ConfigError or ModelLoadError."""
    if config.model.skip_tokenizer_init:
        raise ConfigError("the engine was made with skip_tokenizer_init, and has no tokenizer")
    from headrace_engine.text.tokenizer_loader import read_tokenizer_of  # imports torch

    return read_tokenizer_of(config.model)


def create_input_processor(config: EngineConfig, core: CoreClient, tokenizer: ModelTokenizer) -> InputProcessor:
    """Create the input processor for a core. It refuses far too long texts without tokenising them."""
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
    """Return the tokenizer of the model. If there is none, shut down the core and raise ModelLoadError."""
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
    """Start a core and load its model, in this process or in a child.

    Another engine or interpreter always runs in a child process.

    Raises:
        ModelLoadError, ConfigError, EngineDeadError: the core could not start.
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
