"""`check_cancelled`: for loops that continue after errors of Redis."""

import asyncio


def check_cancelled() -> None:
    """Raise CancelledError if this task was cancelled.

    redis-py may raise an error of its own instead, for example if it is cancelled while it connects.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
