"""`EngineCoreProcess`: the parent's handle on an engine in a child process.

After a device fault or an out-of-memory kill, only the engine restarts: the parent keeps its leases and streams. The
frames between the two are in `frames.py`, and the child's side of them is in `serving.py`.

The child is a new interpreter, not a fork: CUDA and OpenMP do not survive a fork. It leads its own process group, so
that a Ctrl-C in the terminal reaches only the parent. It dies with the thread that started it.
"""

import contextlib
import itertools
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from headrace_engine import errors
from headrace_engine.core.frames import PROTOCOL, Connection, protocol_problem
from headrace_engine.core.outputs import EngineCoreOutputs
from headrace_engine.errors import (
    ConfigError,
    EngineDeadError,
    HeadraceEngineError,
    ModelLoadError,
)
from headrace_engine.options.capabilities import EngineCapabilities, config_problems
from headrace_engine.options.config import EngineConfig
from headrace_engine.options.engines import find_engine
from headrace_engine.requests.pooling_request import PoolingCoreRequest
from headrace_engine.requests.request import EngineCoreRequest
from headrace_engine.runner.contracts import ModelInfo
from headrace_engine.system import control_group, interpreter
from headrace_wire.codes import EngineDeathCause


class EngineCoreProcess:
    """The parent's handle on a core in a child process. Implements `CoreClient`.

    An event loop can watch `fileno()` and call `receive()` when it is readable.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._engine = find_engine(config.engine)
        self._python = config.engine_python or sys.executable
        environment = {**os.environ, **self._engine.environment(config)}
        self._links = self._link_packages(environment) if interpreter.is_other(config.engine_python) else None
        child_read, parent_write = os.pipe()
        parent_read, child_write = os.pipe()
        self._connection = Connection(parent_read, parent_write, waits=False)
        self._oom_kills = control_group.oom_kills()
        try:
            self._process = subprocess.Popen(
                [self._python, "-m", self._engine.child_module, str(child_read), str(child_write)],
                env=environment,
                pass_fds=(child_read, child_write),
                process_group=0,
                stdin=subprocess.DEVNULL,
            )
        except OSError:
            self._connection.close()
            raise
        finally:
            os.close(child_read)
            os.close(child_write)
        self.load_progress = 0.0
        """Share of the weights that is loaded, 0 to 1, as far as the child has told."""
        self._model_info: ModelInfo | None = None
        self._capabilities = EngineCapabilities()
        self._pending: list[EngineCoreOutputs] = []
        self._calls: dict[int, Future[Any]] = {}
        self._has_spoken = False
        """Whether the child has sent any frame."""
        self._failure: HeadraceEngineError | None = None
        self._reported: HeadraceEngineError | None = None
        """The error that the child reported. Raised after all steps before it have been taken."""
        self._call_numbers = itertools.count(1)
        self._stopping = False
        self._closed = False
        self._group_ended = False
        with contextlib.suppress(EngineDeadError):  # `receive` reports how the child ended
            self._send(["config", PROTOCOL, config.to_wire()])

    def _link_packages(self, environment: dict[str, str]) -> interpreter.LinkedPackages:
        """Let another interpreter import what the child needs. Raises ConfigError if it is not a usable interpreter."""
        names = {"headrace_engine", "headrace_wire", self._engine.child_module.partition(".")[0]}
        if interpreter.check(self._python):
            names.add("msgpack")
        links = interpreter.LinkedPackages(sorted(names))
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(links.folder), before]))
        return links

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

    @property
    def capabilities(self) -> EngineCapabilities:
        """What the engine can do. Known once it is ready."""
        assert self.is_ready, "the core is not ready yet"
        return self._capabilities

    def wait_ready(self, timeout: float | None = None) -> ModelInfo:
        """Block until the model is loaded.

        Raises:
            EngineDeadError, ModelLoadError, ConfigError: the child could not start.
            TimeoutError: the model is still loading after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.is_ready:
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                raise TimeoutError(f"the engine is not ready after {timeout:g} s")
            if select.select([self._connection.read_fd], [], [], remaining)[0]:
                self._pending += self.receive()
        return self.model_info

    def add_request(self, request: EngineCoreRequest | PoolingCoreRequest) -> None:
        self._send(["add", request.KIND, request.to_wire()])

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self._send(["abort", list(request_ids)])

    def call(self, method: str, *args: Any) -> "Future[Any]":
        number, answer = next(self._call_numbers), Future[Any]()
        answer.set_running_or_notify_cancel()  # a cancelled wait does not cancel the call
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
                assert answer.done()  # `receive` has given it the same error

    def fileno(self) -> int:
        return self._connection.read_fd

    def receive(self) -> list[EngineCoreOutputs]:
        """Read what the child has sent. Call when `fileno()` is readable.

        Raises:
            EngineDeadError, ModelLoadError, ConfigError: the child failed or is gone.
        """
        try:
            if self._reported is not None:
                raise self._reported
            return self._take(self._connection.receive())
        except EOFError:
            self._failure = self._silent_end()
            self._fail_calls(self._failure)
            raise self._failure from None
        except HeadraceEngineError as error:
            self._failure = error
            self._fail_calls(error)
            raise

    def _silent_end(self) -> HeadraceEngineError:
        """Return the error for a child that ended without a report."""
        how = self._exit_description()
        if self._process.returncode == _PYTHON_ERROR and not self._has_spoken:
            return ConfigError(
                f"engine {self._engine.name}: {self._python} -m {self._engine.child_module} failed before it could say "
                f"why; standard error has the traceback. What it imports is installed there by "
                f"{self._engine.install_command}"
            )
        if self._was_killed_for_memory():
            limit = control_group.memory_limit()
            full = "the machine" if limit is None else f"its control group, whose limit is {limit / 2**30:.1f} GiB,"
            return EngineDeadError(
                f"the engine process {self.pid} was killed by the kernel, because {full} ran out of memory: "
                "lower kv_cache_memory or max_num_seqs, or give it more memory",
                cause="out_of_memory",
            )
        return EngineDeadError(f"the engine process {self.pid} ended, {how}")

    def _was_killed_for_memory(self) -> bool:
        if self._process.returncode != -signal.SIGKILL or self._stopping or self._oom_kills is None:
            return False
        return (control_group.oom_kills() or 0) > self._oom_kills

    def _take(self, frames: list[Any]) -> list[EngineCoreOutputs]:
        self._has_spoken = self._has_spoken or bool(frames)
        steps: list[EngineCoreOutputs] = []
        for kind, *values in frames:
            if kind == "outputs":
                steps.append(EngineCoreOutputs.from_wire(values[0]))
            elif kind == "log":
                level, name, line = values
                logging.getLogger(name).log(level, "%s", line)
            elif kind == "loading":
                self.load_progress = values[0]
            elif kind == "ready":
                self._on_ready(*values)
            elif kind == "answer":
                self._calls.pop(values[0]).set_result(values[1])
            elif kind == "refused":
                self._calls.pop(values[0]).set_exception(_error(values[2], values[1]))
            else:
                self._reported = self._reported or self._failed(*values)
        if self._reported is not None and not steps:
            raise self._reported
        return steps

    def _on_ready(self, info: dict[str, Any], capabilities: Any = None, protocol: object = None, *_: Any) -> None:
        problem = protocol_problem(protocol)
        if problem is not None:
            self._reported = ConfigError(problem)
            return
        self._capabilities = EngineCapabilities.from_wire(capabilities)
        problems = config_problems(self._config, self._capabilities)
        if problems:
            self._reported = ConfigError("; ".join(problems))
            return
        self._model_info = ModelInfo.from_wire(info)

    def _failed(self, sentence: str, name: str) -> HeadraceEngineError:
        """Return the error that the child reported."""
        if name in _STARTUP_ERRORS:
            return _STARTUP_ERRORS[name](sentence)
        if name in _IMPORT_ERRORS and not self.is_ready:
            return ConfigError(
                f"engine {self._engine.name} cannot import its parts with {self._python} ({sentence}): install them "
                f"there by {self._engine.install_command}, or give the interpreter that has them as engine_python"
            )
        summary = f"the engine process {self.pid} failed with {name}" if self.is_ready else None
        return EngineDeadError(sentence, cause=_CAUSES.get(name, "crash"), summary=summary)

    def _fail_calls(self, error: HeadraceEngineError) -> None:
        with contextlib.suppress(KeyError):  # no call is left; another thread may have answered some
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
        """Ask the child to exit, kill it after `timeout` seconds, and reap it. Outputs that were not taken are lost."""
        self._stopping = True
        with contextlib.suppress(EngineDeadError):  # the child has ended already and is reaped below
            self._send(["stop"])
        try:
            self._process.wait(timeout)
            self._kill_group()
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill the child and its own children at once, and reap it."""
        self._stopping = True
        self._kill_group()
        self._process.wait()

    def _kill_group(self) -> None:
        """Kill the rest of the child's process group, such as worker ranks, which hold device memory.

        Sends the signal only once, before the child is reaped or right after: later the number may belong to another
        group.
        """
        if not self._group_ended:
            self._group_ended = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the pipes. Call after `shutdown` or `kill`, when no thread reads any more."""
        if not self._closed:
            self._closed = True
            self._connection.close()
            if self._links is not None:
                self._links.remove()
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
        self._kill_group()
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"exit status {status}"


_CAUSES: dict[str, EngineDeathCause] = {
    "MemoryError": "out_of_memory",
    "OutOfMemoryError": "out_of_memory",  # torch's error for the memory of a device
    "RecompilationError": "recompilation",
}
_PYTHON_ERROR = 1
"""Exit status of an interpreter after an exception. If the child has sent no frame, the import of its module failed."""
_STARTUP_ERRORS: dict[str, type[HeadraceEngineError]] = {"ConfigError": ConfigError, "ModelLoadError": ModelLoadError}
_IMPORT_ERRORS = ("ImportError", "ModuleNotFoundError")


def _error(kind: str, sentences: list[str]) -> HeadraceEngineError:
    """Return the error of a refused call. The message of an unexpected error begins with the name of its class."""
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, errors.InvalidRequestError):
        return known(sentences)
    if kind in _STARTUP_ERRORS:
        return _STARTUP_ERRORS[kind](sentences[0])
    return HeadraceEngineError(f"{kind}: {sentences[0]}")
