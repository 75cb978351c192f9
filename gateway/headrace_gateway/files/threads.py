"""A thread pool for the directory of files, so that a disk that hangs does not block the gateway's other threads."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

_NUM_THREADS: Final = 8
_OF_ONE_OWNER: Final = 3
"""Calls that one owner may run at a time. Its other calls wait, so slow files of one owner cannot hold all threads."""
_THREADS: Final = ThreadPoolExecutor(_NUM_THREADS, "files")
file_owner: Final[ContextVar[str | None]] = ContextVar("file_owner", default=None)
"""Folder name of the API key whose files the current task reads and writes. None: the gateway's own calls."""

Value = TypeVar("Value")
_Slots = defaultdict[str, asyncio.Semaphore]
_SLOTS: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, _Slots]] = WeakKeyDictionary()


def start_in_file_thread(act: Callable[..., Value], *args: Any, **named: Any) -> "asyncio.Future[Value]":
    """Start a short call. It runs to completion even if the caller stops waiting."""
    return asyncio.get_running_loop().run_in_executor(_THREADS, partial(act, *args, **named))


async def in_file_thread(act: Callable[..., Value], *args: Any, **named: Any) -> Value:
    """Run the call in one of these threads as soon as `file_owner` has a free slot."""
    owner = file_owner.get()
    if owner is None:
        return await start_in_file_thread(act, *args, **named)
    slots = _SLOTS.setdefault(asyncio.get_running_loop(), defaultdict(partial(asyncio.Semaphore, _OF_ONE_OWNER)))
    slot = slots[owner]
    await slot.acquire()
    running = start_in_file_thread(act, *args, **named)
    running.add_done_callback(lambda _: slot.release())  # the thread is busy until then, even if no task waits
    return await asyncio.shield(running)
