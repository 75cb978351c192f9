"""`move_queue`: moves messages from the keys of earlier versions to those of their queue.

Before 2026-11-29 all queues of a Redis database shared some keys, and the others had other names. Workers of both
versions may serve a queue at once: each sees only the messages that it has sorted itself, and both take from the same
lists. Messages that a worker of an earlier version holds stay there until it settles them or their leases expire.
"""

from dataclasses import replace
from typing import Final

import redis

from headrace_broker.key_schema import KeySchema, RedisKey
from headrace_broker.keys import KEYS, queue_lists
from headrace_broker.scripts import load

_MOVED_AT_ONCE: Final = 200
_OF_ALL_QUEUES: Final = (
    "leases",
    "lease_requests",
    "lease_bodies",
    "lease_records",
    "lease_meta",
    "lease_deliveries",
    "dead_letters",
    "virtual_time",
    "mean_cost",
)
_RENAMED: Final = {
    ":queue:wake-up:": ":ready:bell:",
    ":queue:": ":ready:",
    ":lease:request": ":lease:leases:request",
} | {f":lease:{name}:": f":lease:leases:{name}:" for name in ("held", "delayed")}


def _older(key: RedisKey) -> RedisKey:
    """Return the key of the earlier versions. In Lua its name begins with `old`."""
    pattern, parts = key.pattern, key.parts
    for now, before in _RENAMED.items():
        pattern = pattern.replace(now, before)
    if key.name in _OF_ALL_QUEUES:
        pattern, parts = pattern.removesuffix(":<queue>"), ()
    return replace(key, name=f"old_{key.name}", pattern=pattern, parts=parts)


def _both_versions() -> KeySchema:
    schema = KeySchema(KEYS.words)
    for key in KEYS:
        schema.add(key)
        if (older := _older(key)).pattern != key.pattern:
            schema.add(older)
    return schema


MOVE_QUEUE: Final = load(
    "headrace_broker",
    _both_versions(),
    *("key_checks", "tenant_prelude", "lease_prelude", "ready_prelude", "lease_move_queue"),
)


def move_queue(client: "redis.Redis", queue: str) -> bool:
    """Move up to 200 messages of a queue to its own keys. Return whether more may be left. Redis's errors pass through.

    A message keeps its place, its age, its delay and its number of deliveries.
    """
    move = MOVE_QUEUE.bound(client)
    return bool(move(_MOVED_AT_ONCE, queue=queue, list=queue_lists(queue)))


def move_all(client: "redis.Redis", queue: str) -> None:
    """Move all messages of a queue that `move_queue` moves."""
    while move_queue(client, queue):
        pass
