"""`check_cancelled`: for loops that go on after errors of Redis."""

import asyncio


def check_cancelled() -> None:
    """Raise CancelledError where this task was cancelled.

    redis-py may raise an error of its own instead, as where it is cancelled while it connects.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
