"""`PreparerProcess`: one process that prepares requests, watched by the worker's event loop.

Nothing here blocks. Bytes that the pipe does not take are written later, and answers are read in short turns.
"""

import fcntl
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from headrace_monitoring.logging import frames
from headrace_wire.codes import ErrorCode
from headrace_workers.preparation.process import MEMORY_BYTES, FrameReader, packed

logger = logging.getLogger(__name__)

CPU_SECONDS: Final = 10.0
"""Limit for one request's processor time. A tokenizer takes some 5 s for 4 MiB of text."""
WAIT_SECONDS: Final = 60.0
"""Limit for one request's wall-clock time. It ends a process that hangs or gets no processor time."""
START_SECONDS: Final = 300.0
"""Limit for a start for which no request waits: many workers may start at once and compete for the processors."""
TURN_SECONDS: Final = 0.01
"""Longest time for which answers are handled in one turn of the event loop."""
_RESTART_SECONDS: Final = 1.0
_MAX_DEATHS: Final = 2
_PIPE_BYTES: Final = 1 << 20
_MALLOC: Final = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""Otherwise glibc raises this threshold when a large block is freed, and then keeps such blocks, 20 MB for Gemma 3."""

Answer = Callable[[int, list[Any]], None]
"""Takes a request's number, and the kind and values of its answer; see `process.py`."""
Verdict = Callable[[str, str | None], None]
"""Takes a grammar that the process has compiled, and the problem with it, or None."""


class PreparerProcess:
    """Prepares requests in the order of their submission. Restarts its process when a request exceeds a limit.

    That request is refused, and the requests behind it are sent again. If the process dies of another cause, its
    request is sent again once, and refused at the second death. If the process dies before it can prepare requests,
    none is refused: they wait until a process starts.

    Args:
        is_quick: the process answers `slow` instead of spending a long time on a request.
        on_answer: called with each answer.
        on_verdict: called with each verdict on a grammar.
        cpu_seconds: processor time that one request may take.
    """

    def __init__(
        self, *, is_quick: bool, on_answer: Answer, on_verdict: Verdict, cpu_seconds: float = CPU_SECONDS
    ) -> None:
        self._on_answer = on_answer
        self._on_verdict = on_verdict
        self._arguments = ["quick"] if is_quick else []
        self._cpu_seconds = cpu_seconds
        self._hub: Any = None
        self._settings: bytes | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.is_ready = False
        """The process has read its settings and can prepare requests."""
        self.is_failing = False
        """The last process ended before it could prepare requests, or did not start."""
        self._reader: FrameReader | None = None
        self._ended: list[subprocess.Popen[bytes]] = []
        """Killed processes that may not have exited yet."""
        self._unsent: deque[memoryview] = deque()
        self._is_writing = False
        self._submitted: dict[int, bytes] = {}
        """Packed requests by number. The process works on the first one."""
        self._since = time.monotonic()
        """Monotonic time at which the process began its start, or the first request."""
        self._deaths = 0
        """Deaths of processes that worked on the first request."""
        self._start_at = 0.0

    def start(self) -> None:
        """Start the process. It imports its modules before it gets its settings."""
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace_workers.preparation.process", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
            bufsize=0,
            env=_MALLOC | os.environ,
        )
        assert process.stdin is not None and process.stdout is not None
        for pipe in (process.stdin, process.stdout):
            os.set_blocking(pipe.fileno(), False)
            with suppress(OSError):  # the user has too many large pipes; small ones are enough
                fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        fd = process.stdout.fileno()
        self._process, self._reader = process, FrameReader(lambda size: os.read(fd, size))
        self.is_ready = False
        self._unsent.clear()
        self._since = time.monotonic()
        for data in (self._settings, *self._submitted.values()):
            if data is not None:
                self._unsent.append(memoryview(data))
        self._watch()

    def attach(self, hub: Any) -> None:
        """Read and write in this event loop; called again after each reconnect, which clears the loop."""
        self._hub = hub
        self._watch()

    def configure(self, settings: dict[str, Any]) -> None:
        self._settings = packed({**settings, "cpu_seconds": self._cpu_seconds})
        self._since = time.monotonic()
        self._send(self._settings)

    def submit(self, number: int, values: list[Any]) -> None:
        if not self._submitted:
            self._since = time.monotonic()
        self._submitted[number] = packed([number, *values])
        self._send(self._submitted[number])

    def learn(self, grammar: str, problem: str | None) -> None:
        self._send(packed([0, grammar, problem]))

    @property
    def _limit(self) -> float:
        """The seconds that the process may take for what it does now. It starts only when it has settings."""
        if self._submitted:
            return WAIT_SECONDS
        return START_SECONDS if self._settings is not None and not self.is_ready else math.inf

    def check(self) -> None:
        """Restart a process that died or hangs. Call it about once a second."""
        self._ended = [process for process in self._ended if process.poll() is None]
        if self._process is None:
            if time.monotonic() >= self._start_at:
                self._start_again()
        elif time.monotonic() - self._since > self._limit:
            self._end_process()
            if self.is_ready:
                self._refuse_first(f"its preparation was not complete after {WAIT_SECONDS:g} s")
            else:
                self.is_failing = True
                logger.error("the preparation process was not ready in time")
            self._start_again()

    def close(self) -> None:
        """End the process for good."""
        self._end_process()
        for process in self._ended:
            with suppress(subprocess.TimeoutExpired):
                process.wait(10.0)

    def _send(self, data: bytes) -> None:
        if self._process is not None:  # else `start` sends it
            self._unsent.append(memoryview(data))
            if not self._is_writing:
                self._write()

    def _write(self) -> None:
        """Write as much as the pipe takes now."""
        assert self._process is not None and self._process.stdin is not None
        fd = self._process.stdin.fileno()
        try:
            while self._unsent:
                written = os.write(fd, self._unsent[0])
                if written == len(self._unsent[0]):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = self._unsent[0][written:]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # `_on_readable` notices that the process has ended
            self._unsent.clear()
        self._watch_writing(fd)

    def _watch_writing(self, fd: int) -> None:
        wants = bool(self._unsent)
        if self._hub is not None and wants != self._is_writing:
            self._is_writing = wants
            if wants:
                self._hub.add_writer(fd, self._write)
            else:
                self._hub.remove(fd)

    def _watch(self) -> None:
        if self._hub is None or self._process is None:
            return
        assert self._process.stdin is not None and self._process.stdout is not None
        self._hub.add_reader(self._process.stdout.fileno(), self._on_readable)
        self._is_writing = False
        self._watch_writing(self._process.stdin.fileno())

    def _on_readable(self) -> None:
        until = time.monotonic() + TURN_SECONDS
        try:
            while self._reader is not None and time.monotonic() < until:
                self._take(*self._reader.next())
        except BlockingIOError:
            pass
        except EOFError:
            self._on_death()
        except Exception as error:  # noqa: BLE001  # the event loop would end
            logger.error("an answer of the preparation process could not be handled: %s", frames(error))

    def _take(self, number: int, *values: Any) -> None:
        if number == 0 and values:
            self._on_verdict(*values)
            return
        self._since = time.monotonic()
        if number == 0:
            self.is_ready, self.is_failing = True, False
            return
        self._deaths = 0
        if self._submitted.pop(number, None) is not None:
            self._on_answer(number, list(values))

    def _on_death(self) -> None:
        process = self._process
        assert process is not None
        self._end_process()
        if not self._submitted or not self.is_ready:
            self.is_failing = not self.is_ready
            when = "" if self.is_ready else " before it could prepare requests"
            logger.error("the preparation process ended with status %s%s", process.returncode, when)
            self.is_ready = False
            self._start_at = time.monotonic() + _RESTART_SECONDS
            return
        self._deaths += 1
        if process.returncode == -signal.SIGPROF:
            self._refuse_first(f"its preparation takes more than {self._cpu_seconds:g} s of processor time")
        elif self._deaths >= _MAX_DEATHS:
            self._refuse_first(
                f"its preparation ended the process twice, with status {process.returncode};"
                f" its memory limit is {MEMORY_BYTES >> 20} MiB"
            )
        self._start_again()

    def _start_again(self) -> None:
        try:
            self.start()
        except OSError as error:  # no memory or no file descriptor for a process at present
            self.is_failing = True
            logger.error("the preparation process could not be started: %s", error)
            self._start_at = time.monotonic() + _RESTART_SECONDS

    def _refuse_first(self, problem: str) -> None:
        """Refuse the request that the process worked on."""
        number = next(iter(self._submitted))
        del self._submitted[number]
        self._deaths = 0
        logger.warning("a request could not be prepared: %s", problem)
        self._on_answer(number, ["refused", ErrorCode.INVALID_REQUEST, f"the request cannot be served: {problem}"])

    def _end_process(self) -> None:
        process, self._process, self._reader = self._process, None, None
        self._unsent.clear()
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            if self._hub is not None:
                self._hub.remove(pipe.fileno())
            pipe.close()
        self._is_writing = False
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.02)
        self._ended.append(process)


MakeProcess = Callable[..., PreparerProcess]
"""Takes `is_quick`, `on_answer` and `on_verdict`."""
