"""`QueueLevelReader`: how many messages of each queue are ready, held and dead, in one round trip that writes nothing.

For monitors. Works with no worker running, and under a Redis user that may only read.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Literal

from headrace_broker.keys import (
    PRIORITY_SEPARATOR,
    PRIORITY_STEPS,
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

if TYPE_CHECKING:
    import redis

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
    """By priority step: messages that a worker may take, sorted by tenant or not yet. One that has aged counts at the
    better step."""
    leased: int
    """Messages in a worker's hands, and those whose time has not come: a worker is needed for both."""
    run_out: int
    """Of these, whose lease has run out while no worker has put them back yet."""
    dead: Mapping[str, int]
    """By reason: dead letters, counting the newest 16 MiB."""
    oldest_age_seconds: float | None
    """Of the message that has waited longest at the head of a list; None where nothing tells. Where it says not when
    it was enqueued, since it was first sorted, or else since this reader first saw it there."""
    delayed: int = 0
    """Of the leased, those whose time has not come, or has and nobody has put them back yet."""
    oldest_age_clock: Literal["producer", "redis"] | None = None
    """What told the age: the producer's clock against Redis's, or Redis's alone."""
    problem: str | None = None
    """Why no worker can be given messages: a key of the queue holds something of another type, and counts as empty."""

    @property
    def num_ready(self) -> int:
        return sum(self.ready.values())

    @property
    def num_dead(self) -> int:
        return sum(self.dead.values())


@dataclass(frozen=True, slots=True)
class Backlog:
    """One queue's messages, or those of one tenant in it, at one moment."""

    num_ready: int
    oldest_age_seconds: float | None
    """Since the message that has waited longest was sorted, by Redis's clock; None where none is sorted."""
    delayed: int = 0
    """Messages whose time has not come."""

    @property
    def num_queued(self) -> int:
        """What a bound on the queue and the tenant's quota count."""
        return self.num_ready + self.delayed


class QueueLevelReader:
    """Reads levels again and again. Redis's errors pass through.

    The dead letters are counted again only when they have changed.
    """

    def __init__(self, client: "redis.Redis") -> None:
        self._client: Final = client
        self._dead: dict[str, Counter[str]] = {}
        self._dead_mark = b""
        self._first_seen: dict[str, tuple[bytes, float]] = {}
        """By list: the unsorted message that has waited longest, and when it was first found, by Redis's clock."""

    def read(self, queues: Iterable[str]) -> dict[str, QueueLevels]:
        """The levels of these queues, by name."""
        queues = list(queues)
        problems = self._problems(queues)
        lists = [name for queue in queues for name in queue_lists(queue)]
        keys = _LEVELS.keys(
            list=lists,
            sorted_ids=[*map(sorted_ids_key, lists)],
            held=[*map(held_key, lists)],
            delayed=[*map(delayed_key, lists)],
        )
        # EVAL_RO, and whole each time: only it is allowed to a user that may read and nothing else
        reply: Any = self._client.eval_ro(_LEVELS.text, len(keys), *keys)
        now, mark, counts = reply
        if mark != self._dead_mark:
            self._dead, self._dead_mark = self._count_dead(), mark
        levels = {}
        for position, queue in enumerate(queues):
            of_lists = counts[position * len(PRIORITY_STEPS) : (position + 1) * len(PRIORITY_STEPS)]
            arrived, is_sorted, held, delayed, run_out, *enqueue_times, marks, since = zip(*of_lists, strict=True)
            seen = [self._seen(name, mark, float(now)) for name, mark in zip(queue_lists(queue), marks, strict=True)]
            age, clock = _oldest_age(float(now), chain.from_iterable(enqueue_times), [*seen, *map(_seconds, since)])
            levels[queue] = QueueLevels(
                ready=dict(zip(PRIORITY_STEPS, map(sum, zip(arrived, is_sorted, strict=True)), strict=True)),
                leased=sum(held) + sum(delayed),
                run_out=sum(run_out),
                dead=self._dead.get(queue, Counter()),
                oldest_age_seconds=age,
                oldest_age_clock=clock,
                delayed=sum(delayed),
                problem=problems.get(queue),
            )
        return levels

    def _seen(self, list_name: str, mark: bytes, now: float) -> float | None:
        """Since when the message of this mark is known to be the first of the list; None at the first look at it."""
        if mark and self._first_seen.get(list_name, (b"", now))[0] == mark:
            return self._first_seen[list_name][1]
        self._first_seen[list_name] = (mark, now)
        return None

    def _problems(self, queues: Sequence[str]) -> dict[str, str]:
        """What is wrong with each queue that has a key of the wrong type."""
        checked = [(queue, key, kind) for queue in queues for key, kind in queue_key_types(queue).items()]
        keys, kinds = _WRONG_KEYS.keys(key=[key for _, key, _ in checked]), [kind for _, _, kind in checked]
        wrong: Any = self._client.eval_ro(_WRONG_KEYS.text, len(keys), *keys, *kinds)
        return {
            checked[index][0]: problem.decode(errors="replace")
            for index, problem in zip(wrong[::2], wrong[1::2], strict=True)
        }

    def _count_dead(self) -> dict[str, Counter[str]]:
        """By queue and reason. Letters that come or go meanwhile change the mark, and all are counted again."""
        by_queue: dict[str, Counter[str]] = {}
        num_counted, bytes_read, is_more = 0, 0, True
        while is_more and bytes_read < _DEAD_BYTES_READ:
            reply: Any = self._client.eval_ro(_DEAD_LEVELS.text, 0, str(num_counted))
            counted, num_bytes, dead = reply
            for name, reason, count in zip(dead[0::3], dead[1::3], dead[2::3], strict=True):
                by_queue.setdefault(_queue_of(name), Counter())[reason.decode(errors="replace")] += count
            is_more, num_counted, bytes_read = counted > num_counted, counted, bytes_read + num_bytes
        return by_queue


def read_tenant_level(client: "redis.Redis", queue: str, tenant: str, *, of_interest: int) -> Backlog:
    """How many messages the tenant has in the queue; '' is that of those that name none. Redis's errors pass through.

    Exact up to the count `of_interest`, as long as no more than a thousand messages are unsorted. A Redis user that may
    not read messages sees those that a worker has sorted.
    """
    lists = queue_lists(queue)
    keys = _TENANT_LEVEL.keys(
        waiting=waiting_key(queue),
        delayed_tenants=delayed_tenants_key(queue),
        tenant_ids=[tenant_ids_key(name, tenant) for name in lists],
    )
    reply: Any = client.eval_ro(_TENANT_LEVEL.text, len(keys), *keys, tenant, str(of_interest), *lists)
    count, delayed, since, now = reply
    return Backlog(count, max(0.0, (int(now) - int(since)) / 1e6) if since else None, delayed)


def read_backlog(client: "redis.Redis", queue: str) -> Backlog:
    """How many messages of all tenants the queue holds. Redis's errors pass through.

    Reads no message, so that a Redis user may ask who may not read them.
    """
    lists = queue_lists(queue)
    with client.pipeline() as pipe:
        pipe.time()
        for name in lists:
            pipe.llen(name)
            pipe.zcard(sorted_ids_key(name))
            pipe.zcard(delayed_key(name))
            pipe.zrange(sorted_ids_key(name), 0, 0, withscores=True)
        (seconds, microseconds), *replies = pipe.execute()
    arrived, are_sorted, delayed, first = (replies[position::4] for position in range(4))
    since = min((entries[0][1] for entries in first if entries), default=None)
    age = None if since is None else max(0.0, seconds + (microseconds - since) / 1e6)
    return Backlog(sum(arrived) + sum(are_sorted), age, sum(delayed))


def read_tenants(client: "redis.Redis", queue: str) -> dict[str, int]:
    """Sorted messages that wait, by tenant; at most some more than a thousand tenants. Redis's errors pass through."""
    found: Any = client.zrange(waiting_key(queue), 0, -1, withscores=True)
    return {tenant.decode(errors="replace"): int(count) for tenant, count in found}


def _queue_of(list_name: bytes) -> str:
    return list_name.decode(errors="replace").partition(PRIORITY_SEPARATOR)[0]


def _oldest_age(
    now: float, enqueue_times: Iterable[bytes], since: Iterable[float | None]
) -> tuple[float | None, Literal["producer", "redis"] | None]:
    """The greatest age, and the clock that told it. `since` is by Redis's clock, as `now` is."""
    ages: list[tuple[float, Literal["producer", "redis"]]] = []
    for text in enqueue_times:
        try:
            ages.append((max(0.0, now - float(text)), "producer"))
        except ValueError:  # the message does not say, or says nonsense
            continue
    ages += [(max(0.0, now - moment), "redis") for moment in since if moment is not None]
    return max(ages, default=(None, None), key=lambda age: age[0])


def _seconds(microseconds: bytes) -> float | None:
    return int(microseconds) / 1e6 if microseconds else None


def retry_after(levels: "QueueLevels | Backlog", excess: int) -> float | None:
    """Estimates in how many seconds `excess` requests will have left the queue; None where nothing tells.

    Little's law: a queue whose first request waited `oldest_age_seconds` behind as many as now wait behind it moves
    by `num_ready` in that time.
    """
    if levels.oldest_age_seconds is None or not levels.num_ready:
        return None
    return min(max(levels.oldest_age_seconds * excess / levels.num_ready, 1.0), _LONGEST_RETRY_SECONDS)
