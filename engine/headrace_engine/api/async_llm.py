"""AsyncLLMEngine: streaming generation for asyncio programs."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace_engine.api.input_processor import ChatMessage, ProcessedRequest, Prompt
from headrace_engine.api.llm_engine import (
    adapter_id,
    check_adapter,
    config_of,
    create_input_processor,
    default_params,
    fetch_tokenizer,
    priority_of,
    read_whole_tokenizer,
    start_core,
)
from headrace_engine.api.output_collector import OutputCollector
from headrace_engine.api.output_processor import OutputProcessor
from headrace_engine.errors import DuplicateRequestError, EngineDeadError, EngineDrainingError, LoRACapacityError
from headrace_engine.options.config import EngineConfig
from headrace_engine.options.engine_args import AsyncEngineArgs
from headrace_engine.plain_values import RequestId, request_id_of, request_ids_of
from headrace_engine.requests.lora_request import LoRARequest
from headrace_engine.requests.outputs import RequestOutput
from headrace_engine.requests.sampling_params import RequestOutputKind, SamplingParams
from headrace_engine.text.chat import ChatOptions
from headrace_engine.text.tokenizer import ModelTokenizer
from headrace_engine.vllm_names import missing_attribute, refuse_arguments


class AsyncLLMEngine:
    """Many concurrent streams over one core.

        engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model="path/or/name"))
        async for output in engine.generate("Hello", SamplingParams(), "request-1"):
            print(output.outputs[0].text)
        await engine.shutdown()

    Outputs that a slow consumer has not taken are merged into one: deltas are joined, and a cumulative output replaces
    the one before. If the consumer of a stream stops (break, cancelled task, closed generator), its request is aborted.
    Call all methods in one event loop. Loading blocks the loop, so create the engine before the loop has other work.
    """

    tokenizer: ModelTokenizer

    def __init__(self, config: EngineConfig, *, core_in_process: bool = False) -> None:
        self._config = config
        self._core = start_core(config, in_process=core_in_process)
        tokenizer = fetch_tokenizer(config, self._core)
        self._input_processor = create_input_processor(config, self._core, tokenizer)
        self.model_info = self._input_processor.model_info
        self.tokenizer = tokenizer
        self._whole_tokenizer: Any = None
        self._output_processor = OutputProcessor(tokenizer)
        self._streams: dict[str, OutputCollector] = {}
        self._aborted_early: set[str] = set()
        """Requests that were aborted during their validation."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine-outputs")
        self._pump: asyncio.Task[None] | None = None
        self._dead: EngineDeadError | None = None
        self._is_closed = False
        self._loras: set[LoRARequest] = set()
        """Adapters that have been loaded successfully before."""
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs, **unsupported: Any) -> "AsyncLLMEngine":
        """Load the model. Raises the same errors as `LLM`."""
        refuse_arguments(unsupported)
        return cls(config_of(engine_args), core_in_process=getattr(engine_args, "core_in_process", False))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute("AsyncLLMEngine", name)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: RequestId,
        *,
        priority: int | None = None,
        lora_request: LoRARequest | None = None,
        **unsupported: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Stream the outputs of one request. `sampling_params.output_kind` determines their content.

        Raises:
            InvalidRequestError, DuplicateRequestError, LoRAError: before anything was computed.
            EngineDrainingError: the engine accepts no more requests.
            EngineDeadError: the core failed; the request is lost.
        """
        refuse_arguments(unsupported)
        name = request_id_of(request_id)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        process = partial(
            self._input_processor.process, name, prompt, priority=priority_of(priority), lora_request=lora_request
        )
        async with contextlib.aclosing(self._stream(name, params, process)) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        sampling_params: SamplingParams | None,
        request_id: RequestId,
        *,
        priority: int | None = None,
        lora_request: LoRARequest | None = None,
        **chat_options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Do what `generate` does, for a conversation. `chat_options` are the fields of `ChatOptions`."""
        name = request_id_of(request_id)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        process = partial(
            self._input_processor.process_chat,
            name,
            messages,
            priority=priority_of(priority),
            lora_request=lora_request,
            chat_options=ChatOptions.from_optional(**chat_options),
        )
        async with contextlib.aclosing(self._stream(name, params, process)) as outputs:
            async for output in outputs:
                yield output

    def get_default_sampling_params(self) -> SamplingParams:
        """See `LLMEngine.get_default_sampling_params`."""
        return default_params(self.model_info)

    async def abort(self, request_id: RequestId | Iterable[RequestId], **unsupported: Any) -> None:
        """Abort requests. Each stream yields a last output with finish reason abort. Unknown ids are ignored."""
        refuse_arguments(unsupported)
        for name in request_ids_of(request_id):
            aborted = self._output_processor.abort(name)
            if aborted is not None:
                output, choice_ids = aborted
                self._core.abort_requests(choice_ids)
                self._streams[name].put(output)
            elif name in self._streams:
                self._aborted_early.add(name)

    async def drain(self, timeout: float | None = None) -> None:
        """Refuse new requests, and wait until all streams have ended.

        Raises:
            TimeoutError: some streams are still running after `timeout` seconds. New requests are still refused.
            EngineDeadError: the core failed in the meantime.
        """
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            raise TimeoutError(f"{len(self._streams)} requests have not ended after {timeout:g} s") from None
        if self._dead is not None:
            raise self._dead

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """See `LLMEngine.add_lora`. Other requests continue while the adapter is read."""
        check_adapter(lora_request)
        added: bool = await self._call("add_lora", lora_request.to_wire())
        self._loras.add(lora_request)
        return added

    async def remove_lora(self, lora_id: int) -> bool:
        """See `LLMEngine.remove_lora`."""
        lora_id = adapter_id(lora_id)
        self._loras = {known for known in self._loras if known.lora_int_id != lora_id}
        return bool(await self._call("remove_lora", lora_id))

    async def list_loras(self) -> set[int]:
        """See `LLMEngine.list_loras`."""
        return set(await self._call("list_loras"))

    async def pin_lora(self, lora_id: int) -> bool:
        """See `LLMEngine.pin_lora`."""
        return bool(await self._call("pin_lora", adapter_id(lora_id)))

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """See `LLMEngine.reset_prefix_cache`."""
        refuse_arguments({"reset_running_requests": reset_running_requests, "reset_connector": reset_connector})
        return bool(await self._call("reset_prefix_cache"))

    async def get_tokenizer(self) -> Any:
        """See `LLMEngine.get_tokenizer`."""
        if self._whole_tokenizer is None:
            self._whole_tokenizer = await asyncio.to_thread(read_whole_tokenizer, self._config)
        return self._whole_tokenizer

    def get_num_unfinished_requests(self) -> int:
        return len(self._streams)

    async def _call(self, method: str, *args: Any) -> Any:
        await self.check_health()
        self._take_outputs()
        return await asyncio.wrap_future(self._core.call(method, *args))

    @property
    def is_running(self) -> bool:
        """Whether the core is alive."""
        return self._dead is None

    @property
    def is_stopped(self) -> bool:
        """Whether the core has failed or was shut down."""
        return self._dead is not None

    errored = is_stopped

    @property
    def dead_error(self) -> EngineDeadError | None:
        """The reason why the core is dead."""
        return self._dead

    async def check_health(self) -> None:
        """Raise EngineDeadError if the core has failed."""
        if self._dead is not None:
            raise self._dead

    def shutdown(self, timeout: float | None = None) -> Awaitable[None]:
        """Stop the core at once. Open streams end with EngineDeadError.

        In an event loop, await the result: this gives the streams the time to end. A program without an event loop may
        call this too.

        Args:
            timeout: not used. A core that does not end is killed after some seconds.
        """
        del timeout  # a parameter of vLLM
        self._dead = self._dead or EngineDeadError("the engine was shut down")
        if not self._is_closed:
            self._is_closed = True
            self._core.shutdown()
            self._thread.shutdown()  # waits for the task that takes outputs
            self._core.close()
            self._input_processor.close()
            with contextlib.suppress(RuntimeError):  # the event loop of the streams is closed
                self._fail_streams()
        return _Ended(self._pump)

    def _check_id(self, request_id: str) -> None:
        if self._dead is not None:
            raise self._dead
        if self._draining:
            raise EngineDrainingError("the engine drains: it finishes what it has and takes no more requests")
        if request_id in self._streams:
            raise DuplicateRequestError(f"request {request_id} is in the engine already")

    async def _stream(
        self, request_id: str, params: SamplingParams, process: Callable[..., ProcessedRequest]
    ) -> AsyncGenerator[RequestOutput]:
        self._check_id(request_id)
        kind = getattr(params, "output_kind", RequestOutputKind.CUMULATIVE)  # `process` refuses params without it
        collector = OutputCollector(kind)
        self._streams[request_id] = collector  # before any await: the id is in use from here on
        self._idle.clear()
        try:
            arrival_time = time.monotonic()
            if isinstance(params, SamplingParams) and params.structured_outputs is not None:
                await asyncio.to_thread(self._input_processor.check_grammar, params)  # the result is cached
            request = process(params=params, arrival_time=arrival_time)
            lora_request = request.choices[0].lora_request
            if lora_request is not None and lora_request not in self._loras:
                with contextlib.suppress(LoRACapacityError):  # the core loads the adapter when a request needs it
                    await self.add_lora(lora_request)
            await self.check_health()
            self._output_processor.add_request(request)
            if request_id in self._aborted_early:
                await self.abort(request_id)
            else:
                for choice in request.choices:
                    self._core.add_request(choice)
                self._take_outputs()
            finished = False
            while not finished:
                output = await collector.get()
                finished = output.finished
                yield output
        finally:
            # Also reached if the consumer has stopped: the request is still registered then, and is aborted here.
            del self._streams[request_id]
            self._aborted_early.discard(request_id)
            if not self._streams:
                self._idle.set()
            aborted = self._output_processor.abort(request_id)
            if aborted is not None and self._dead is None:
                with contextlib.suppress(EngineDeadError):  # the task that reads the outputs gets the same error
                    self._core.abort_requests(aborted[1])

    def _take_outputs(self) -> None:
        if self._pump is None:
            self._pump = asyncio.create_task(self._pump_outputs(), name="engine-outputs")

    async def _pump_outputs(self) -> None:
        """Pass the outputs of the core to the streams until the core ends."""
        loop = asyncio.get_running_loop()
        try:
            while (outputs := await loop.run_in_executor(self._thread, self._core.get_outputs)) is not None:
                processed = self._output_processor.process(outputs.outputs, stats=outputs.stats)
                if processed.finished_choice_ids:
                    self._core.abort_requests(processed.finished_choice_ids)
                for output in processed.request_outputs:
                    self._streams[output.request_id].put(output)
        except Exception as error:  # noqa: BLE001  # any failure must end the streams
            if not isinstance(error, EngineDeadError):
                error = EngineDeadError(f"the engine core failed: {type(error).__name__}: {error}")
            self._dead = self._dead or error
            self._fail_streams()

    def _fail_streams(self) -> None:
        assert self._dead is not None
        for collector in self._streams.values():
            collector.fail(self._dead)


class _Ended:
    """The result of `shutdown`. A caller need not await it, unlike a coroutine."""

    def __init__(self, pump: "asyncio.Task[None] | None") -> None:
        self._pump = pump

    def __await__(self) -> Generator[Any, None, None]:
        if self._pump is not None and not self._pump.done():
            yield from asyncio.wait([self._pump]).__await__()
