"""Reads the delayed messages of a queue: they are not due yet, and no worker holds them."""

from dataclasses import dataclass, field
from typing import Any, Final

import redis

from headrace_broker.keys import delayed_key, lease_bodies_key, queue_lists
from headrace_broker.queue.message_envelope import open_envelope

_LARGEST: Final = 64 * 1024
"""Limit for the bytes of a message that is read, because there may be very many messages."""


@dataclass(frozen=True, slots=True)
class DelayedMessage:
    """One message; its headers are empty if it is larger than 64 KiB or malformed."""

    due: float
    """Unix seconds by Redis's clock."""
    queue: str
    headers: dict[str, Any] = field(repr=False)
    priority: int


def delayed_messages(client: "redis.Redis", queue: str, limit: int) -> list[DelayedMessage]:
    """Return up to `limit` delayed messages, the first due first. Redis's errors pass through."""
    with client.pipeline(transaction=False) as pipe:
        for list_name in queue_lists(queue):
            pipe.zrange(delayed_key(list_name), 0, limit - 1, withscores=True)
        found = sorted((due, lease_id) for pairs in pipe.execute() for lease_id, due in pairs)[:limit]
        for _, lease_id in found:
            pipe.hstrlen(lease_bodies_key(queue), lease_id)
        readable = [size <= _LARGEST for size in pipe.execute()]
        for (_, lease_id), is_readable in zip(found, readable, strict=True):
            if is_readable:
                pipe.hget(lease_bodies_key(queue), lease_id)
        bodies = iter(pipe.execute())
    return [
        _message(due, queue, next(bodies) if is_readable else None)
        for (due, _), is_readable in zip(found, readable, strict=True)
    ]


def _message(due: float, queue: str, body: bytes | None) -> DelayedMessage:
    try:
        envelope = open_envelope(body or b"")
    except (ValueError, RecursionError):
        return DelayedMessage(due, queue, {}, 0)
    priority = envelope["properties"].get("priority")
    return DelayedMessage(due, queue, envelope["headers"], priority if isinstance(priority, int) else 0)
