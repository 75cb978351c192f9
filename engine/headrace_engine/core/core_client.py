"""`CoreClient`: the interface to a core, which runs in this process (`InProcessCore`) or in a child (`process.py`)."""

import queue
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, Protocol

from headrace_engine.core.engine_core import EngineCore
from headrace_engine.core.outputs import EngineCoreOutputs
from headrace_engine.core.runner_factory import create_runner
from headrace_engine.errors import EngineDeadError
from headrace_engine.options.capabilities import EngineCapabilities
from headrace_engine.options.config import EngineConfig
from headrace_engine.requests.request import EngineCoreRequest
from headrace_engine.runner.contracts import ModelInfo


class CoreClient(Protocol):
    """Any thread may add requests at any time. One thread takes the outputs."""

    @property
    def model_info(self) -> ModelInfo: ...

    @property
    def capabilities(self) -> EngineCapabilities: ...

    def add_request(self, request: EngineCoreRequest) -> None: ...

    def abort_requests(self, request_ids: Iterable[str]) -> None: ...

    def call(self, method: str, *args: Any) -> "Future[Any]":
        """Run `EngineCore.call` in the process of the core.

        The answer arrives only while a thread takes outputs or calls `wait`.
        """

    def wait(self, answer: "Future[Any]") -> None:
        """Block until a call is answered. Only the thread that takes outputs may call this."""

    def get_outputs(self) -> EngineCoreOutputs | None:
        """Block until a step is done and return its outputs, or None after `shutdown`.

        Raises:
            EngineDeadError: the core failed.
        """

    def shutdown(self) -> None: ...

    def close(self) -> None:
        """Close the connection. Call after `shutdown`, when no thread takes outputs any more."""


class InProcessCore:
    """The core in the process of the caller. The thread that asks for outputs computes the steps."""

    def __init__(self, config: EngineConfig) -> None:
        self.core = EngineCore(config, create_runner(config))
        self.model_info = self.core.model_info
        self.capabilities = self.core.capabilities
        self._commands: queue.SimpleQueue[EngineCoreRequest | list[str] | None] = queue.SimpleQueue()
        self.core.wake = lambda: self._commands.put([])  # an empty abort: makes the loop look for work again
        self._stopped = False
        self._failure: str | None = None

    def add_request(self, request: EngineCoreRequest) -> None:
        self._commands.put(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self._commands.put(list(request_ids))

    def call(self, method: str, *args: Any) -> "Future[Any]":
        return self.core.call(method, *args)

    def wait(self, answer: "Future[Any]") -> None:
        answer.exception()

    def get_outputs(self) -> EngineCoreOutputs | None:
        if self._failure is not None:
            raise EngineDeadError(self._failure)
        while not self._stopped:
            while not self._commands.empty() or not self.core.has_work():
                command = self._commands.get()
                if command is None:
                    self._stopped = True
                    return None
                if isinstance(command, EngineCoreRequest):
                    self.core.add_request(command)
                else:
                    self.core.abort_requests(command)
            try:
                outputs = self.core.step()
            except Exception as error:
                self._failure = f"the engine core failed: {type(error).__name__}: {error}"
                raise EngineDeadError(self._failure) from error
            if outputs.outputs or outputs.stats.num_requests:
                return outputs
        return None

    def shutdown(self) -> None:
        self._commands.put(None)
        self.core.shutdown()

    def close(self) -> None:
        """Nothing to close: the core runs in this process."""
