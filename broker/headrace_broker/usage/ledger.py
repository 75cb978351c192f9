"""Reads the usage ledger, which acknowledgements write (`lua/usage_prelude.lua`), and renames its rows."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Self

import msgpack
import redis

from headrace_broker.keys import QUEUE_PREFIX, usage_key
from headrace_broker.packing import pack
from headrace_broker.scripts import script

HOUR: Final = 3600
DAY: Final = 86_400
_RENAME: Final = script("usage_rename")
_AT_ONCE: Final = 200
"""Hours that one call to Redis reads."""


@dataclass(frozen=True, slots=True)
class UsageCounts:
    """Sums over ended requests."""

    requests: int = 0
    """Messages of the queue. An HTTP request with several prompts has as many."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    attempts: int = 0
    """Leases of the messages. A delivery after a drain, a preemption or a shutdown counts, too."""
    milliseconds: int = 0
    """From the last delivery of each request to its end."""

    def plus(self, other: Self) -> "UsageCounts":
        return UsageCounts(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class UsageGroup:
    """Group of one ledger row. The texts may be anything that a producer has written."""

    start: int
    """Beginning of the bucket, in unix seconds."""
    tenant: str
    """'' for none."""
    key_name: str
    """Name of the API key; '' for none."""
    model: str
    kind: str
    """A `UsageKind`."""
    step: int
    """Priority step of the list in which the message arrived."""


Usages = dict[UsageGroup, UsageCounts]


def read_usage(servers: Iterable["redis.Redis"], width: int, start: int, end: int) -> Usages:
    """Return the rows of the buckets that begin in a time range, summed over the servers of the queues.

    Args:
        width: of a bucket: `HOUR` or `DAY`. Redis has a hash for each hour.
        start, end: unix seconds; the end is excluded.

    Redis's errors pass through.
    """
    found: Usages = {}
    hours = range(-(-start // width) * width, -(-end // width) * width, HOUR)
    for server in servers:
        for first in range(0, len(hours), _AT_ONCE):
            some = hours[first : first + _AT_ONCE]
            with server.pipeline(transaction=False) as pipe:
                for each in some:
                    pipe.hgetall(usage_key(each))
                buckets = pipe.execute(raise_on_error=False)
            for each, bucket in zip(some, buckets, strict=True):
                if isinstance(bucket, redis.ResponseError) and "WRONGTYPE" in str(bucket):
                    continue  # the script that counts skips it, too
                if isinstance(bucket, Exception):
                    raise bucket
                for group, counts in _rows_of(each // width * width, bucket):
                    before = found.get(group)
                    found[group] = counts if before is None else before.plus(counts)
    return found


def rename_row(server: "redis.Redis", bucket: str, row: bytes, tenant: str) -> bool:
    """Add a row of a bucket to that of another tenant, whose key has the same name. Return whether it was there.

    Args:
        bucket: a `usage_key`.
        row: the field of the hash.
    """
    _, _, *rest = msgpack.unpackb(row, raw=True)
    return bool(_RENAME.bound(server)(row, pack([tenant, tenant, *rest]), usage=bucket))


def _rows_of(start: int, bucket: dict[bytes, bytes]) -> Iterable[tuple[UsageGroup, UsageCounts]]:
    for field, value in bucket.items():
        try:
            names, counts = msgpack.unpackb(field, raw=True), msgpack.unpackb(value, raw=True)
            tenant, key_name, queue, kind, step = names
            group = (_text(tenant), _text(key_name), _text(queue).removeprefix(QUEUE_PREFIX), _text(kind), int(step))
            row = UsageCounts(*map(int, counts))
        except Exception:  # noqa: BLE001, S112  # a row written by hand; msgpack's errors have no common base
            continue
        yield UsageGroup(start, *group), row


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
