"""The core in a child process, and the parent's handle on it.

A device fault or an out-of-memory kill then costs an engine restart, not the parent with its leases and streams.
Parent and child exchange msgpack frames over two pipes:

    parent -> child   ["add", request] ["abort", [ids]] ["stop"]         (first frame of all: the config)
                      ["call", number, method, arguments]
    child -> parent   ["ready", model info] ["outputs", step] ["failed", sentence, kind]
                      ["answer", number, value] ["refused", number, sentences, kind]
                      ["log", level, logger, line], so that one process writes one log in one format

The child is a fresh interpreter (not a fork: CUDA and OpenMP do not survive one), leads its own process group so
that a Ctrl-C in the terminal reaches only the parent, and dies with the thread that started it.
"""

import contextlib
import ctypes
import gc
import itertools
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

import msgpack

from headrace_engine import errors
from headrace_engine.config import EngineConfig
from headrace_engine.core.engine_core import EngineCore
from headrace_engine.core.outputs import EngineCoreOutputs
from headrace_engine.core.pipe_writer import PipeWriter
from headrace_engine.core.runner_factory import create_runner
from headrace_engine.errors import (
    ConfigError,
    EngineDeadError,
    EngineDeathCause,
    HeadraceEngineError,
    ModelLoadError,
    raised_at,
)
from headrace_engine.request import EngineCoreRequest
from headrace_engine.runner.contracts import ModelInfo, ModelRunner

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_READ_SIZE = 1 << 16
_LULL_SECONDS = 1.0


class Connection:
    """msgpack frames over a read and a write descriptor."""

    def __init__(self, read_fd: int, write_fd: int, *, waits: bool) -> None:
        self.read_fd = read_fd
        self._writer = PipeWriter(write_fd, waits=waits)
        self._unpacker = msgpack.Unpacker(raw=False, max_buffer_size=0, strict_map_key=False)

    def send(self, frame: Any) -> None:
        """Raises BrokenPipeError when the other side is known to be gone."""
        self._writer.write(msgpack.packb(frame))

    def receive(self) -> list[Any]:
        """Read once (blocks unless the descriptor is readable) and return the complete frames.

        Raises:
            EOFError: the other side is gone.
        """
        data = os.read(self.read_fd, _READ_SIZE)
        if not data:
            raise EOFError
        self._unpacker.feed(data)
        return list(self._unpacker)

    def close(self) -> None:
        os.close(self.read_fd)
        self._writer.close()


class EngineCoreProcess:
    """Parent's handle on a core in a child; implements `CoreClient`, and suits an event loop too.

    With an event loop: watch `fileno()`, and when it is readable call `receive()`.
    """

    def __init__(self, config: EngineConfig) -> None:
        child_read, parent_write = os.pipe()
        parent_read, child_write = os.pipe()
        self._connection = Connection(parent_read, parent_write, waits=False)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headrace_engine.core.process", str(child_read), str(child_write)],
            pass_fds=(child_read, child_write),
            process_group=0,
            stdin=subprocess.DEVNULL,
        )
        os.close(child_read)
        os.close(child_write)
        self._model_info: ModelInfo | None = None
        self._pending: list[EngineCoreOutputs] = []
        self._calls: dict[int, Future[Any]] = {}
        self._failure: HeadraceEngineError | None = None
        self._reported: HeadraceEngineError | None = None
        """The child's own last words; raised once all steps that came before them are taken."""
        self._call_numbers = itertools.count(1)
        self._stopping = False
        self._closed = False
        self._send(config.to_wire())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        return self._model_info is not None

    @property
    def model_info(self) -> ModelInfo:
        assert self._model_info is not None, "the core is not ready yet"
        return self._model_info

    def wait_ready(self, timeout: float | None = None) -> ModelInfo:
        """Block until the model is loaded.

        Raises:
            EngineDeadError, ModelLoadError, ConfigError: the child could not start.
            TimeoutError: it is still loading after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.is_ready:
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                raise TimeoutError(f"the engine is not ready after {timeout:g} s")
            if select.select([self._connection.read_fd], [], [], remaining)[0]:
                self._pending += self.receive()
        return self.model_info

    def add_request(self, request: EngineCoreRequest) -> None:
        self._send(["add", request.to_wire()])

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self._send(["abort", list(request_ids)])

    def call(self, method: str, *args: Any) -> "Future[Any]":
        number, answer = next(self._call_numbers), Future[Any]()
        answer.set_running_or_notify_cancel()  # whoever waits for it may be cancelled; the call is made all the same
        self._calls[number] = answer
        try:
            self._send(["call", number, method, list(args)])
        except EngineDeadError as error:
            self._failure = self._failure or error
        if self._failure is not None:
            self._fail_calls(self._failure)
        return answer

    def wait(self, answer: "Future[Any]") -> None:
        while not answer.done():
            try:
                self._pending += self.receive()
            except HeadraceEngineError:
                assert answer.done()  # with this very error

    def fileno(self) -> int:
        return self._connection.read_fd

    def receive(self) -> list[EngineCoreOutputs]:
        """Take what the child has sent; call when `fileno()` is readable.

        Raises:
            EngineDeadError, ModelLoadError, ConfigError: the child failed or is gone.
        """
        try:
            if self._reported is not None:
                raise self._reported
            return self._take(self._connection.receive())
        except EOFError:
            how = self._exit_description()
            # Nobody but the kernel, short of memory, kills a process that its parent did not end.
            killed = self._process.returncode == -signal.SIGKILL and not self._stopping
            cause: EngineDeathCause = "out_of_memory" if killed else "crash"
            self._failure = EngineDeadError(f"the engine process {self.pid} ended, {how}", cause=cause)
            self._fail_calls(self._failure)
            raise self._failure from None
        except HeadraceEngineError as error:
            self._failure = error
            self._fail_calls(error)
            raise

    def _take(self, frames: list[Any]) -> list[EngineCoreOutputs]:
        steps: list[EngineCoreOutputs] = []
        for kind, *values in frames:
            if kind == "outputs":
                steps.append(EngineCoreOutputs.from_wire(values[0]))
            elif kind == "log":
                level, name, line = values
                logging.getLogger(name).log(level, "%s", line)
            elif kind == "ready":
                self._model_info = ModelInfo(**values[0])
            elif kind == "answer":
                self._calls.pop(values[0]).set_result(values[1])
            elif kind == "refused":
                self._calls.pop(values[0]).set_exception(_error(values[2], values[1]))
            else:
                sentence, name = values
                self._reported = (
                    _STARTUP_ERRORS[name](sentence)
                    if name in _STARTUP_ERRORS
                    else EngineDeadError(
                        sentence,
                        cause=_CAUSES.get(name, "crash"),
                        summary=f"the engine process {self.pid} failed with {name}" if self.is_ready else None,
                    )
                )
        if self._reported is not None and not steps:
            raise self._reported
        return steps

    def _fail_calls(self, error: HeadraceEngineError) -> None:
        with contextlib.suppress(KeyError):  # all are answered, perhaps by another thread that saw the same
            while True:
                self._calls.popitem()[1].set_exception(error)

    def get_outputs(self) -> EngineCoreOutputs | None:
        while not self._pending:
            try:
                self._pending += self.receive()
            except EngineDeadError:
                if self._stopping:
                    return None
                raise
        return self._pending.pop(0)

    def shutdown(self, timeout: float = 10.0) -> None:
        """Ask the child to end, kill it after `timeout` seconds, and reap it. Outputs not yet taken are lost."""
        self._stopping = True
        with contextlib.suppress(EngineDeadError):  # it has ended already; what follows reaps it
            self._send(["stop"])
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the child at once and reap it."""
        self._stopping = True
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Give the pipe ends back; after `shutdown` or `kill`, when nobody reads any more."""
        if not self._closed:
            self._closed = True
            self._connection.close()
            self._fail_calls(EngineDeadError("the engine was shut down"))

    def _send(self, frame: Any) -> None:
        try:
            self._connection.send(frame)
        except OSError:
            raise EngineDeadError(f"the engine process {self.pid} is gone, {self._exit_description()}") from None

    def _exit_description(self) -> str:
        try:
            status = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "but has not exited yet"
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"exit status {status}"


_CAUSES: dict[str, EngineDeathCause] = {
    "MemoryError": "out_of_memory",
    "OutOfMemoryError": "out_of_memory",  # torch's, for a device
    "RecompilationError": "recompilation",
}
_STARTUP_ERRORS: dict[str, type[HeadraceEngineError]] = {"ConfigError": ConfigError, "ModelLoadError": ModelLoadError}


def _error(kind: str, sentences: list[str]) -> HeadraceEngineError:
    """The child's refusal as the error that it was; an unexpected one keeps its name in the sentence."""
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, errors.InvalidRequestError):
        return known(sentences)
    if kind in _STARTUP_ERRORS:
        return _STARTUP_ERRORS[kind](sentences[0])
    return HeadraceEngineError(f"{kind}: {sentences[0]}")


class _LogSender(logging.Handler):
    """Sends the child's log lines to the parent."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._connection.send(["log", record.levelno, record.name, self.format(record)])
        except OSError:
            self.handleError(record)  # the parent is gone; the next frame of the core ends the child


def _child_main(read_fd: int, write_fd: int) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent alone decides when its engine ends
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(read_fd, write_fd, waits=True)
    commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # A thread drains the pipe at all times: the parent never blocks on a core that is busy with a step.
    threading.Thread(target=_read_commands, args=(connection, commands), daemon=True, name="commands").start()
    config = EngineConfig.from_wire(commands.get())
    logging.basicConfig(level=logging.INFO, handlers=[_LogSender(connection)], format="%(message)s")
    core = None
    try:
        core = EngineCore(config, _import_runner(config))
        core.wake = lambda: commands.put(["wake"])
        connection.send(["ready", asdict(core.model_info)])
        _serve(core, connection, commands)
        core.shutdown()
    except BrokenPipeError:
        return 0  # the parent is gone
    except Exception as error:
        if core is None:
            logger.exception("the engine stops")  # no request was here yet that the text could quote
        else:
            logger.error("the engine stops at\n%s", raised_at(error))
        connection.send(["failed", f"{type(error).__name__}: {error}", type(error).__name__])
        return 1
    return 0


def _import_runner(config: EngineConfig) -> ModelRunner:
    """Make the runner, whose imports leave half a million objects that stay.

    To look through them again and again for garbage would take an eighth of the imports' time, and once a while hold up
    a step for a quarter of a second later.
    """
    gc.disable()
    try:
        return create_runner(config)
    finally:
        gc.freeze()
        gc.enable()


def _read_commands(connection: Connection, commands: "queue.SimpleQueue[Any]") -> None:
    try:
        while True:
            for frame in connection.receive():
                commands.put(frame)
    except (EOFError, OSError):
        commands.put(["stop"])


def _serve(core: EngineCore, connection: Connection, commands: "queue.SimpleQueue[Any]") -> None:
    while True:
        if not core.has_work():
            core.check_integrity()
        while not commands.empty() or not core.has_work():
            kind, *values = _next_command(core, commands)
            if kind == "add":
                core.add_request(EngineCoreRequest.from_wire(values[0]))
            elif kind == "abort":
                core.abort_requests(values[0])
            elif kind == "call":
                _answer(connection, values[0], core.call(values[1], *values[2]))
            elif kind != "wake":
                return
        connection.send(["outputs", core.step().to_wire()])


def _next_command(core: EngineCore, commands: "queue.SimpleQueue[Any]") -> list[Any]:
    """Wait for a command; a first lull is for what would stall the steps of others later."""
    if not core.is_prepared_for_grammars:
        try:
            return list(commands.get(timeout=_LULL_SECONDS))
        except queue.Empty:
            core.prepare_for_grammars()
    return list(commands.get())


def _answer(connection: Connection, number: int, call: "Future[Any]") -> None:
    """Send what comes of a call once it is known."""

    def send(done: "Future[Any]") -> None:
        if done.cancelled():
            return  # the core ends
        error = done.exception()
        frame = ["answer", number, done.result()] if error is None else _refusal(number, error)
        with contextlib.suppress(OSError):  # the parent is gone; the next frame of the core ends the child
            connection.send(frame)

    call.add_done_callback(send)


def _refusal(number: int, error: BaseException) -> list[Any]:
    if not isinstance(error, errors.InvalidRequestError):
        logger.error("a call failed", exc_info=error)  # about adapters or the tokenizer: no request's text is in it
        return ["refused", number, [str(error)], type(error).__name__]
    return ["refused", number, error.problems, type(error).__name__]


if __name__ == "__main__":
    sys.exit(_child_main(int(sys.argv[1]), int(sys.argv[2])))
