"""`PipeWriter`: the write end of a pipe, for a caller that must not block."""

import os
import select
import threading
from collections import deque
from contextlib import suppress

_LOOK_SECONDS = 1.0
"""How long the thread waits for a writable pipe before it checks whether the pipe was closed."""


class PipeWriter:
    """Owns the write end of a pipe.

    Args:
        waits: block the caller while the pipe is full. Otherwise a thread writes, in order, what the pipe does not take
            at once: a busy reader must not block the caller, which may be an event loop.
    """

    def __init__(self, fd: int, *, waits: bool) -> None:
        os.set_blocking(fd, waits)
        self._fd = fd
        self._unwritten: deque[memoryview] = deque()
        self._lock = threading.Lock()
        self._is_closed = False

    def write(self, data: bytes) -> None:
        """Write bytes. Raises BrokenPipeError if the reader is known to be gone."""
        with self._lock:
            rest = memoryview(data)
            if not self._unwritten:
                rest = self._write_some(rest)
            if rest:
                self._unwritten.append(rest)
                if len(self._unwritten) == 1:
                    threading.Thread(target=self._write_rest, name="engine-pipe", daemon=True).start()

    def close(self) -> None:
        """Close the descriptor. Bytes that are not written yet are dropped."""
        with self._lock:
            self._is_closed = True
            self._unwritten.clear()
            os.close(self._fd)

    def _write_some(self, data: memoryview) -> memoryview:
        with suppress(BlockingIOError):
            while data:
                data = data[os.write(self._fd, data) :]
        return data

    def _write_rest(self) -> None:
        while True:
            with suppress(OSError, ValueError):  # the pipe was closed in the meantime
                select.select([], [self._fd], [], _LOOK_SECONDS)
            with self._lock:
                if self._is_closed:
                    return
                try:
                    rest = self._write_some(self._unwritten[0])
                except OSError:  # the reader is gone: the thread that reads from it notices
                    self._unwritten.clear()
                    return
                self._unwritten.popleft()
                if rest:
                    self._unwritten.appendleft(rest)
                if not self._unwritten:
                    return
