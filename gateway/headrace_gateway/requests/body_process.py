"""`BodyProcess`: parses and checks large bodies in another process, so that they do not hold up the event loop.

A body of 4 MiB can take seconds, and a thread would not help: it holds the interpreter's lock while it parses. The
process starts with the first large body. It ends with the gateway, even a killed one, because its pipe is closed then.
"""

import asyncio
import multiprocessing
import os
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Final, NamedTuple, TypeVar

import structlog

from headrace_gateway.errors import ApiError
from headrace_monitoring.logging import frames
from headrace_wire.codes import GatewayCode

Value = TypeVar("Value")
_PAUSES: Final = 2.0
"""Seconds of pause per second of an owner's turn."""
_LONGEST_PAUSE: Final = 1.0
"""A turn may last long because Redis is away. The owner need not wait for that again."""
_NICENESS: Final = 5
"""On a processor that the event loop needs too, the process then gets about a third."""

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)


class _Reader(NamedTuple):
    process: SpawnProcess
    pipe: Connection


class BodyProcess:
    """One process, which reads one body at a time. A caller of `run` must hold the turn of the body's owner."""

    def __init__(self) -> None:
        self._reader: _Reader | None = None
        self._thread: Final = ThreadPoolExecutor(1, "body-process")
        """The thread that waits for the process."""
        self._turns: Final[defaultdict[Hashable, asyncio.Lock]] = defaultdict(asyncio.Lock)
        """One lock per owner."""

    @asynccontextmanager
    async def turn(self, owner: Hashable) -> AsyncIterator[None]:
        """Wait until the owner's earlier large bodies have left this block, then run the block.

        So at most one large body of an owner is being read or submitted, however many bodies the owner sends. The next
        one waits twice as long as the block took, at most a second, so
        that most of the time is left to others.
        """
        turn = self._turns[owner]
        await turn.acquire()
        began = time.monotonic()
        try:
            yield
        finally:
            pause = min(_PAUSES * (time.monotonic() - began), _LONGEST_PAUSE)
            asyncio.get_running_loop().call_later(pause, turn.release)

    async def run(self, owner: Hashable, raw: bytes, act: Callable[[bytes], Value]) -> Value:
        """Return the result of `act(raw)` in the process. Raises the ApiError of `act`, or 500 if the process died."""
        # If the client disconnects, its owner's turn must not end before the process has read this body.
        exchange = asyncio.get_running_loop().run_in_executor(self._thread, self._exchange, raw, act)
        try:
            succeeded, found = await asyncio.shield(exchange)
        except asyncio.CancelledError:
            await asyncio.wait([exchange])
            raise
        if not succeeded:
            if not isinstance(found, ApiError):
                logger.error("large body not read", owner=str(owner), exception=str(found))
            raise found
        value: Value = found
        return value

    async def aclose(self) -> None:
        """End the process."""
        self._end()
        self._thread.shutdown(wait=False)

    def _exchange(self, raw: bytes, act: Callable[[bytes], Any]) -> tuple[bool, Any]:
        self._reader = reader = self._reader or _start()
        try:
            reader.pipe.send((raw, act))
            answer: tuple[bool, Any] = reader.pipe.recv()
        except (OSError, EOFError):
            self._end()
            message = "the process that reads large bodies died: try again"
            return False, ApiError(500, "server_error", GatewayCode.INTERNAL_ERROR, message)
        return answer

    def _end(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.process.kill()
            reader.process.join()


def _start() -> _Reader:
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    process = context.Process(target=_serve, args=(its,), daemon=True, name="body-process")
    process.start()
    its.close()
    return _Reader(process, ours)


def _serve(pipe: Connection) -> None:
    """Read bodies until the gateway's end of the pipe is closed."""
    os.nice(_NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches this process too, but the gateway still needs it
    while True:
        try:
            raw, act = pipe.recv()
        except EOFError:
            return
        pipe.send(_outcome(raw, act))


def _outcome(raw: bytes, act: Callable[[bytes], Any]) -> tuple[bool, Any]:
    try:
        return True, act(raw)
    except ApiError as error:
        return False, error
    except Exception as error:  # noqa: BLE001  # the gateway logs it
        return False, RuntimeError(frames(error))
