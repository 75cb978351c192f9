"""The frames between the parent and an engine's child process: msgpack over two pipes.

A process that speaks this protocol is an engine. `core.serving` implements it for a `Core`.

    parent -> child   ["config", PROTOCOL, config]                       (the first frame)
                      ["add", kind, request] ["abort", [ids]] ["stop"]
                      ["call", number, method, arguments]
    child -> parent   ["ready", model info, capabilities, PROTOCOL]      (once)
                      ["outputs", step] ["failed", sentence, kind]
                      ["answer", number, value] ["refused", number, sentences, kind]
                      ["log", level, logger, line]                       (the parent writes it to the one log)
                      ["loading", share of the weights that is loaded]

The kind in "add" is "generate" for an `EngineCoreRequest` and "pool" for a `PoolingCoreRequest`. A model takes one of
the two: "pool" if its `ModelInfo.pooling` is set.

Before "ready", a child may send only "log", "loading" and "failed". It ends after it has sent "failed", when "stop"
arrives, and when the parent has closed a pipe. The kind of an error is the name of an exception class. For errors of
options, models and requests, the parent raises an exception of the same class.
"""

import os
import select
import threading
from collections import deque
from contextlib import suppress
from typing import Any, Final

import msgpack

PROTOCOL: Final = 4
"""Version of the frames. It grows with every change that an older side cannot read."""
_READ_SIZE = 1 << 16


class Connection:
    """msgpack frames over a read and a write descriptor."""

    def __init__(self, read_fd: int, write_fd: int, *, waits: bool) -> None:
        self.read_fd = read_fd
        self._writer = PipeWriter(write_fd, waits=waits)
        self._unpacker = msgpack.Unpacker(raw=False, max_buffer_size=0, strict_map_key=False)

    def send(self, frame: Any) -> None:
        """Send a frame. Raises BrokenPipeError if the other side is known to be gone."""
        self._writer.write(msgpack.packb(frame))

    def receive(self) -> list[Any]:
        """Read once and return the complete frames. Blocks unless the descriptor is readable.

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


def protocol_problem(child: object) -> str | None:
    """Return a sentence that names the older side if the versions of the frames differ."""
    if child == PROTOCOL:
        return None
    number = child if isinstance(child, int) else 0
    older, way = ("engine", "the package of the engine") if number < PROTOCOL else ("parent", "Headrace")
    return f"the engine speaks protocol {child}, its parent {PROTOCOL}: the {older} is older, update {way}"


_LOOK_SECONDS = 1.0
"""How long the thread waits for a writable pipe before it checks whether the pipe was closed."""


class PipeWriter:
    """Owns the write end of a pipe.

    Args:
        waits: True blocks the caller while the pipe is full. With False, a thread writes the bytes that the pipe does
            not take at once. So a busy reader does not block the caller, which may be an event loop.
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
                except OSError:  # the reader is gone, which `Connection.receive` reports
                    self._unwritten.clear()
                    return
                self._unwritten.popleft()
                if rest:
                    self._unwritten.appendleft(rest)
                if not self._unwritten:
                    return
