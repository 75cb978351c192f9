"""A thread pool for the directory of files, so that a disk that hangs does not block the gateway's other threads."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

_NUM_THREADS: Final = 8
_THREADS: Final = ThreadPoolExecutor(_NUM_THREADS, "files")

Value = TypeVar("Value")


def start_in_file_thread(act: Callable[..., Value], *args: Any, **named: Any) -> "asyncio.Future[Value]":
    """Start the call. It runs to completion even if the caller stops waiting."""
    return asyncio.get_running_loop().run_in_executor(_THREADS, partial(act, *args, **named))


async def in_file_thread(act: Callable[..., Value], *args: Any, **named: Any) -> Value:
    """Run the call in one of these threads."""
    return await start_in_file_thread(act, *args, **named)
