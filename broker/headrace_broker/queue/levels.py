"""`QueueLevelReader`: counts the ready, leased and dead messages of each queue, and writes nothing.

For monitors. It works without a running worker, and with a Redis user that may only read. A message is unsorted while
it is in the list to which its producer pushed it, or in the list's `arrived` list. It is sorted once a worker has moved
it to its tenant's sorted set.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Literal

import redis

from headrace_broker.keys import (
    arrived_key,
    delayed_key,
    delayed_tenants_key,
    held_key,
    queue_key_types,
    queue_lists,
    sorted_ids_key,
    tenant_ids_key,
    waiting_key,
)
from headrace_broker.scripts import script
from headrace_broker.server.connections import CONNECTION_ERRORS, address_of
from headrace_broker.server.queue_servers import ClientOf, client_of_queue
from headrace_wire.codes import PRIORITY_STEPS

_LEVELS: Final = script("key_checks", "queue_levels")
_WRONG_KEYS: Final = script("key_checks", "wrong_keys")
_DEAD_LEVELS: Final = script("dead_levels")
_TENANT_LEVEL: Final = script("tenant_prelude", "tenant_level")
_LONGEST_RETRY_SECONDS: Final = 3600.0
_DEAD_BYTES_READ: Final = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class QueueLevels:
    """One queue at one moment."""

    ready: Mapping[int, int]
    """By priority step: messages that a worker may take, sorted and unsorted. An aged message counts at the step to
    which it has moved."""
    leased: int
    """Messages that a worker holds, and delayed messages. Both need a running worker."""
    run_out: int
    """Leased messages with an expired lease that no worker has returned to the queue yet."""
    dead: Mapping[str, int]
    """Number of dead letters by reason, among the newest 16 MiB of them."""
    oldest_age_seconds: float | None
    """Greatest age of the messages at the heads of the lists; None if unknown. A message's age counts from its enqueue
    time, or else from when it was first sorted, or else from when this reader first saw it."""
    delayed: int = 0
    """Those of the leased messages that are not due yet, or due and not returned to the queue yet."""
    oldest_age_clock: Literal["producer", "redis"] | None = None
    """How the age was measured: from the producer's clock to Redis's, or by Redis's alone."""
    problem: str | None = None
    """Why workers get no messages: a key of the queue has the wrong type, and counts as empty. Or its server is away,
    and all numbers are 0."""

    @property
    def num_ready(self) -> int:
        return sum(self.ready.values())

    @property
    def num_dead(self) -> int:
        return sum(self.dead.values())

    def summary(self, tenants: Mapping[str, int]) -> dict[str, Any]:
        """Return the figures for operators, as JSON values. `tenants`: number of waiting messages by tenant."""
        return {
            "waiting": self.num_ready,
            "by_priority": {str(step): count for step, count in self.ready.items()},
            "by_tenant": dict(sorted(tenants.items())),
            "delayed": self.delayed,
            "running": self.leased - self.delayed,
            "dead": self.num_dead,
            "oldest_age_seconds": self.oldest_age_seconds,
            "problem": self.problem,
        }


@dataclass(frozen=True, slots=True)
class Backlog:
    """The waiting messages of one queue, or of one tenant in it, at one moment."""

    num_ready: int
    oldest_age_seconds: float | None
    """Seconds by Redis's clock since the oldest sorted message took its place in its list; None if none is sorted."""
    delayed: int = 0
    """Messages that are not due yet."""

    @property
    def num_queued(self) -> int:
        """Ready and delayed messages: the queue's limit and the tenant's quota apply to this number."""
        return self.num_ready + self.delayed


class QueueLevelReader:
    """Reads levels repeatedly. Redis's errors pass through.

    It counts the dead letters of a queue again only when they have changed.

    Args:
        client: the server of all queues, or a function that returns the client of a queue's server.
    """

    def __init__(self, client: "redis.Redis | ClientOf") -> None:
        self._client_of: Final = client_of_queue(client)
        self._dead: Final[dict[str, tuple[bytes, Counter[str]]]] = {}
        """By queue: a text that changes with its dead letters, and their number by reason."""
        self._first_seen: dict[str, tuple[bytes, float]] = {}
        """By list: a digest of its oldest unsorted message, and when that was first seen, by Redis's clock."""

    def read(self, queues: Iterable[str]) -> dict[str, QueueLevels]:
        """Return the levels of these queues, by name."""
        return {queue: self._read_queue(queue) for queue in queues}

    def read_reachable(self, queues: Iterable[str], main: "redis.Redis") -> dict[str, QueueLevels]:
        """Return the same. A queue whose server is away, unless that is `main`, has a `problem` and zeros."""
        found: dict[str, QueueLevels] = {}
        away: dict[redis.Redis, str] = {}
        for queue in queues:
            client = self._client_of(queue)
            try:
                if client not in away:
                    found[queue] = self._read_queue(queue)
                    continue
            except CONNECTION_ERRORS as error:
                if client is main:
                    raise
                away[client] = f"the queue's server {address_of(client)} is away: {error}"
            none = dict.fromkeys(PRIORITY_STEPS, 0)
            found[queue] = QueueLevels(none, 0, 0, {}, None, problem=away[client])
        return found

    def _read_queue(self, queue: str) -> QueueLevels:
        client, lists = self._client_of(queue), queue_lists(queue)
        problem = _problem(client, queue)
        now, mark, counts = _LEVELS.read(
            client,
            queue=queue,
            list=lists,
            arrived=[*map(arrived_key, lists)],
            sorted_ids=[*map(sorted_ids_key, lists)],
            held=[*map(held_key, lists)],
            delayed=[*map(delayed_key, lists)],
        )
        if self._dead.get(queue, (b"",))[0] != mark:
            self._dead[queue] = mark, _count_dead(client, queue)
        unsorted, is_sorted, held, delayed, run_out, *enqueue_times, marks, since = zip(*counts, strict=True)
        seen = [self._seen(name, first, float(now)) for name, first in zip(lists, marks, strict=True)]
        seen += [int(microseconds) / 1e6 if microseconds else None for microseconds in since]
        age, clock = _oldest_age(float(now), chain.from_iterable(enqueue_times), seen)
        return QueueLevels(
            ready=dict(zip(PRIORITY_STEPS, map(sum, zip(unsorted, is_sorted, strict=True)), strict=True)),
            leased=sum(held) + sum(delayed),
            run_out=sum(run_out),
            dead=self._dead[queue][1],
            oldest_age_seconds=age,
            oldest_age_clock=clock,
            delayed=sum(delayed),
            problem=problem,
        )

    def _seen(self, list_name: str, mark: bytes, now: float) -> float | None:
        """Return when the message with this digest was first seen at the head of the list; None if that is now."""
        if mark and self._first_seen.get(list_name, (b"", now))[0] == mark:
            return self._first_seen[list_name][1]
        self._first_seen[list_name] = (mark, now)
        return None


def _problem(client: "redis.Redis", queue: str) -> str | None:
    """Return the problem of a queue that has a key of the wrong type."""
    types = queue_key_types(queue)
    wrong = _WRONG_KEYS.read(client, *types.values(), key=[*types])
    return wrong[-1].decode(errors="replace") if wrong else None


def _count_dead(client: "redis.Redis", queue: str) -> Counter[str]:
    """Count by reason. If the letters change meanwhile, the next `read` notices it and counts again."""
    counts: Counter[str] = Counter()
    num_counted, bytes_read, is_more = 0, 0, True
    while is_more and bytes_read < _DEAD_BYTES_READ:
        counted, num_bytes, dead = _DEAD_LEVELS.read(client, str(num_counted), queue=queue)
        for reason, count in zip(dead[0::2], dead[1::2], strict=True):
            counts[reason.decode(errors="replace")] += count
        is_more, num_counted, bytes_read = counted > num_counted, counted, bytes_read + num_bytes
    return counts


def read_tenant_level(client: "redis.Redis", queue: str, tenant: str, *, of_interest: int) -> Backlog:
    """Count the tenant's messages in the queue; '' stands for messages without a tenant. Redis's errors pass through.

    A count up to `of_interest` is exact if at most a thousand messages are unsorted. With a Redis user that may not
    read messages, only sorted messages are counted.
    """
    lists = queue_lists(queue)
    count, delayed, since, now = _TENANT_LEVEL.read(
        client,
        tenant,
        str(of_interest),
        *lists,
        *map(arrived_key, lists),
        waiting=waiting_key(queue),
        delayed_tenants=delayed_tenants_key(queue),
        tenant_ids=[tenant_ids_key(name, tenant) for name in lists],
    )
    return Backlog(count, max(0.0, (int(now) - int(since)) / 1e6) if since else None, delayed)


def read_backlog(client: "redis.Redis", queue: str) -> Backlog:
    """Count the messages of all tenants in the queue. Redis's errors pass through.

    It reads no message, so that it works with a Redis user that may not read them.
    """
    lists = queue_lists(queue)
    with client.pipeline() as pipe:
        pipe.time()
        for name in lists:
            pipe.llen(name)
            pipe.llen(arrived_key(name))
            pipe.zcard(sorted_ids_key(name))
            pipe.zcard(delayed_key(name))
            pipe.zrange(sorted_ids_key(name), 0, 0, withscores=True)
        (seconds, microseconds), *replies = pipe.execute()
    unsorted, arrived, are_sorted, delayed, first = (replies[position::5] for position in range(5))
    since = min((entries[0][1] for entries in first if entries), default=None)
    age = None if since is None else max(0.0, seconds + (microseconds - since) / 1e6)
    return Backlog(sum(unsorted) + sum(arrived) + sum(are_sorted), age, sum(delayed))


def read_tenants(client: "redis.Redis", queue: str) -> dict[str, int]:
    """Count each tenant's sorted waiting messages, for about 1000 tenants at most. Redis's errors pass through."""
    found: Any = client.zrange(waiting_key(queue), 0, -1, withscores=True)
    return {tenant.decode(errors="replace"): int(count) for tenant, count in found}


def _oldest_age(
    now: float, enqueue_times: Iterable[bytes], since: Iterable[float | None]
) -> tuple[float | None, Literal["producer", "redis"] | None]:
    """Return the greatest age and the clock that measured it. `since` and `now` are by Redis's clock."""
    ages: list[tuple[float, Literal["producer", "redis"]]] = []
    for text in enqueue_times:
        try:
            ages.append((max(0.0, now - float(text)), "producer"))
        except ValueError:  # the message has no enqueue time, or an invalid one
            continue
    ages += [(max(0.0, now - moment), "redis") for moment in since if moment is not None]
    return max(ages, default=(None, None), key=lambda age: age[0])


def retry_after(levels: "QueueLevels | Backlog", excess: int) -> float | None:
    """Estimate in how many seconds `excess` requests will have left the queue; None if the age is unknown.

    By Little's law, a queue that was as long when its oldest request arrived serves `num_ready` requests in
    `oldest_age_seconds`.
    """
    if levels.oldest_age_seconds is None or not levels.num_ready:
        return None
    return min(max(levels.oldest_age_seconds * excess / levels.num_ready, 1.0), _LONGEST_RETRY_SECONDS)
