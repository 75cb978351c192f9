"""The child's side of the frames, for any engine: signals, pipes, logs, and the loop over a `Core`.

The child module of an engine creates its core and calls `run`. Imports no engine.
"""

import contextlib
import ctypes
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol

from headrace_engine import errors
from headrace_engine.core.frames import PROTOCOL, Connection
from headrace_engine.core.outputs import EngineCoreOutputs
from headrace_engine.errors import ConfigError, raised_at
from headrace_engine.options.capabilities import EngineCapabilities
from headrace_engine.options.config import EngineConfig
from headrace_engine.requests.pooling_request import PoolingCoreRequest
from headrace_engine.requests.request import EngineCoreRequest
from headrace_engine.runner.contracts import ModelInfo
from headrace_engine.system.heap import release_freed_heap
from headrace_engine.system.load_progress import RECORD_FIELD

logger = logging.getLogger(__name__)

_REQUESTS: dict[str, type[EngineCoreRequest] | type[PoolingCoreRequest]] = {
    kind.KIND: kind for kind in (EngineCoreRequest, PoolingCoreRequest)
}
_PR_SET_PDEATHSIG = 1


class Core(Protocol):
    """What an engine implements. One thread calls all methods. The core may call `wake` from any thread."""

    wake: Callable[[], None]
    """Set by `run` before the first request. The core calls it, from any thread, when `has_work()` becomes true between
    two calls of its methods."""

    @property
    def model_info(self) -> ModelInfo: ...

    @property
    def capabilities(self) -> EngineCapabilities: ...

    def add_request(self, message: Any) -> None:
        """Queue an `EngineCoreRequest`, or a `PoolingCoreRequest` if `model_info.pooling` is set.

        If an `EngineCoreRequest` has `output_token_ids`, continue after them. An invalid request raises no exception.
        It gets an output with `FinishReason.ERROR`, or `PooledRows` with an `error`, and the reason.
        """

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Forget requests. They get no more outputs. Unknown ids are ignored."""

    def has_work(self) -> bool: ...

    def step(self) -> EngineCoreOutputs:
        """Compute one step. Called only while `has_work()`. An exception ends the process."""

    def call(self, method: str, *args: Any) -> "Future[Any]":
        """Run a method outside the step loop and return plain data. `EngineCore.call` lists the methods."""

    def check_integrity(self) -> None:
        """Assert that no state of finished requests is left. Called when there is no work."""

    def shutdown(self) -> None: ...


def run(make_core: Callable[[EngineConfig], Core], read_fd: int, write_fd: int) -> int:
    """Serve a core to the parent until it sends "stop" or is gone. Return the exit status.

    Args:
        make_core: loads the model. Raises ConfigError or ModelLoadError if a retry cannot help, and ImportError if the
            engine is not installed. After any other exception the worker tries again.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the parent decides when its engine ends
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _keep_from_own_children(read_fd, write_fd)
    connection = Connection(read_fd, write_fd, waits=True)
    commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # A thread always drains the pipe: the parent must not block while the core computes a step.
    threading.Thread(target=_read_commands, args=(connection, commands), daemon=True, name="commands").start()
    logging.basicConfig(level=logging.INFO, handlers=[_LogSender(connection)], format="%(message)s")
    core = None
    try:
        config = _config(commands.get())
        if config is None:
            return 0
        core = make_core(config)
        core.wake = lambda: commands.put(["wake"])
        connection.send(["ready", asdict(core.model_info), core.capabilities.to_wire(), PROTOCOL])
        _serve(core, connection, commands)
        core.shutdown()
    except BrokenPipeError:
        return 0  # the parent is gone
    except Exception as error:  # noqa: BLE001  # every failure is sent to the parent
        _log_failure(error, is_starting=core is None)
        with contextlib.suppress(BrokenPipeError):
            connection.send(["failed", f"{type(error).__name__}: {error}", type(error).__name__])
        return 1
    return 0


def _keep_from_own_children(*descriptors: int) -> None:
    """Keep the pipes from child processes: otherwise the parent would not notice the end of this process."""
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
        os.register_at_fork(after_in_child=partial(os.close, descriptor))


def _config(frame: list[Any]) -> EngineConfig | None:
    """Return the config of the first frame, or None if the parent is gone already.

    Raises:
        ConfigError: the parent has another version of the protocol.
    """
    kind, *values = frame
    if kind == "stop":
        return None
    if kind != "config" or values[0] != PROTOCOL:
        parent = values[0] if kind == "config" else 0
        older = "its parent is older" if parent < PROTOCOL else "the engine is older"
        raise ConfigError(f"the engine speaks protocol {PROTOCOL}, its parent {parent}: {older}, update it")
    return EngineConfig.from_wire(values[1])


def _log_failure(error: Exception, *, is_starting: bool) -> None:
    if isinstance(error, ConfigError | ImportError) and is_starting:
        return  # the parent logs the message, which is complete
    if is_starting:
        logger.error("the engine stops", exc_info=error)  # the error cannot quote a request: there was none yet
    else:
        logger.error("the engine stops at\n%s", raised_at(error))


class _LogSender(logging.Handler):
    """Sends the log lines of the child to the parent."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._connection.send(["log", record.levelno, record.name, self.format(record)])
            if (share := getattr(record, RECORD_FIELD, None)) is not None:
                self._connection.send(["loading", share])
        except OSError:
            self.handleError(record)  # the parent is gone; the next frame of the core ends the child


def _read_commands(connection: Connection, commands: "queue.SimpleQueue[Any]") -> None:
    try:
        while True:
            for frame in connection.receive():
                commands.put(frame)
    except (EOFError, OSError):
        commands.put(["stop"])


def _serve(core: Core, connection: Connection, commands: "queue.SimpleQueue[Any]") -> None:
    while True:
        if not core.has_work():
            core.check_integrity()
        while not commands.empty() or not core.has_work():
            kind, *values = commands.get()
            if kind == "add":
                core.add_request(_REQUESTS[values[0]].from_wire(values[1]))
            elif kind == "abort":
                core.abort_requests(values[0])
            elif kind == "call":
                _answer(connection, values[0], core.call(values[1], *values[2]))
                release_freed_heap()  # the answer may have been a large tokenizer
            elif kind != "wake":
                return
        connection.send(["outputs", core.step().to_wire()])


def _answer(connection: Connection, number: int, call: "Future[Any]") -> None:
    """Send the result of a call as soon as it is known."""

    def send(done: "Future[Any]") -> None:
        if done.cancelled():
            return  # the core is shutting down
        error = done.exception()
        frame = ["answer", number, done.result()] if error is None else _refusal(number, error)
        with contextlib.suppress(OSError):  # the parent is gone; the next frame of the core ends the child
            connection.send(frame)

    call.add_done_callback(send)


def _refusal(number: int, error: BaseException) -> list[Any]:
    if not isinstance(error, errors.InvalidRequestError):
        logger.error(
            "a call failed", exc_info=error
        )  # the error quotes no request: calls concern only adapters, the tokenizer and the cache
        return ["refused", number, [str(error)], type(error).__name__]
    return ["refused", number, error.problems, type(error).__name__]
