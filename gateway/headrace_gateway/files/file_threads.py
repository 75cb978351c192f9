"""Threads for the directory of files: a disk that hangs must not take those that the rest of the gateway needs."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

_NUM_THREADS: Final = 8
_THREADS: Final = ThreadPoolExecutor(_NUM_THREADS, "files")

Value = TypeVar("Value")


def start_in_file_thread(act: Callable[..., Value], *args: Any, **named: Any) -> "asyncio.Future[Value]":
    """Begin it; it runs to its end also where nobody waits for it any more."""
    return asyncio.get_running_loop().run_in_executor(_THREADS, partial(act, *args, **named))


async def in_file_thread(act: Callable[..., Value], *args: Any, **named: Any) -> Value:
    """Call it in one of the threads."""
    return await start_in_file_thread(act, *args, **named)
