"""`QueueLevelReader`: how many messages of each queue are ready, held and dead, in one round trip that writes nothing.

For monitors. Works with no worker running, and under a Redis user that may only read.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from headrace_broker.keys import (
    DEAD_LETTERS_KEY,
    LEASE_BODIES_KEY,
    LEASE_META_KEY,
    LEASES_KEY,
    PRIORITY_SEPARATOR,
    PRIORITY_STEPS,
    queue_lists,
    sorted_ids_key,
    tenant_ids_key,
    waiting_key,
)
from headrace_broker.scripts import lua

if TYPE_CHECKING:
    import redis


_LONGEST_RETRY_SECONDS: Final = 3600.0


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
    """Since the enqueue of the message that has waited longest at the head of a list, the producer's clock against
    Redis's; None where no head says when it was enqueued."""

    @property
    def num_ready(self) -> int:
        return sum(self.ready.values())

    @property
    def num_dead(self) -> int:
        return sum(self.dead.values())


@dataclass(frozen=True, slots=True)
class TenantLevel:
    """One tenant's messages in one queue at one moment."""

    num_ready: int
    oldest_age_seconds: float | None
    """Since the message that has waited longest was sorted, by Redis's clock; None where none is sorted."""


@dataclass(slots=True)
class _DeadLetters:
    mark: str = ""
    by_queue: dict[str, Counter[str]] = field(default_factory=dict)


class QueueLevelReader:
    """Reads levels again and again. Redis's errors pass through.

    The dead letters are counted again only when they have changed.
    """

    def __init__(self, client: "redis.Redis") -> None:
        self._client: Final = client
        self._dead: Final = _DeadLetters()

    def read(self, queues: Iterable[str]) -> dict[str, QueueLevels]:
        """The levels of these queues, by name."""
        queues = list(queues)
        keys = [
            LEASES_KEY,
            LEASE_META_KEY,
            DEAD_LETTERS_KEY,
            LEASE_BODIES_KEY,
            *(key for queue in queues for name in queue_lists(queue) for key in (name, sorted_ids_key(name))),
        ]
        # EVAL_RO, and whole each time: only it is allowed to a user that may read and nothing else
        reply: Any = self._client.eval_ro(lua("queue_levels", prelude=None), len(keys), *keys, self._dead.mark)
        now, lists, leases, mark, dead = reply
        if dead is not None:
            self._dead.mark, self._dead.by_queue = mark.decode(), _by_queue(dead)
        held, run_out = Counter[str](), Counter[str]()
        for name, num_held, num_run_out in _triples(leases):
            queue = _queue_of(name)
            held[queue] += num_held
            run_out[queue] += num_run_out
        levels = {}
        for position, queue in enumerate(queues):
            heads = lists[position * len(PRIORITY_STEPS) : (position + 1) * len(PRIORITY_STEPS)]
            levels[queue] = QueueLevels(
                ready={
                    step: arrived + num_sorted
                    for step, (arrived, num_sorted, *_) in zip(PRIORITY_STEPS, heads, strict=True)
                },
                leased=held[queue],
                run_out=run_out[queue],
                dead=self._dead.by_queue.get(queue, Counter()),
                oldest_age_seconds=_oldest_age(float(now), [text for _, _, *texts in heads for text in texts]),
            )
        return levels


def read_tenant_level(client: "redis.Redis", queue: str, tenant: str, *, of_interest: int) -> TenantLevel:
    """How many messages of the tenant wait; '' is the tenant of those that name none. Redis's errors pass through.

    Exact up to the count `of_interest`, as long as no more than a thousand messages are unsorted.
    """
    lists = queue_lists(queue)
    keys = [waiting_key(queue), *(key for name in lists for key in (name, tenant_ids_key(name, tenant)))]
    script = lua("tenant_level", prelude="tenant_prelude")
    reply: Any = client.eval_ro(script, len(keys), *keys, tenant, str(of_interest))
    count, since, now = reply
    return TenantLevel(count, max(0.0, (int(now) - int(since)) / 1e6) if since else None)


def read_tenants(client: "redis.Redis", queue: str) -> dict[str, int]:
    """Sorted messages that wait, by tenant; at most some more than a thousand tenants. Redis's errors pass through."""
    found: Any = client.zrange(waiting_key(queue), 0, -1, withscores=True)
    return {tenant.decode(errors="replace"): int(count) for tenant, count in found}


def _by_queue(dead: Sequence[Any]) -> dict[str, Counter[str]]:
    by_queue: dict[str, Counter[str]] = {}
    for name, reason, count in _triples(dead):
        by_queue.setdefault(_queue_of(name), Counter())[reason.decode(errors="replace")] += count
    return by_queue


def _triples(flat: Sequence[Any]) -> Iterable[tuple[Any, Any, Any]]:
    return zip(flat[0::3], flat[1::3], flat[2::3], strict=True)


def _queue_of(list_name: bytes) -> str:
    return list_name.decode(errors="replace").partition(PRIORITY_SEPARATOR)[0]


def _oldest_age(now: float, enqueue_times: Iterable[bytes]) -> float | None:
    ages = []
    for text in enqueue_times:
        try:
            ages.append(max(0.0, now - float(text)))
        except ValueError:  # the message does not say, or says nonsense
            continue
    return max(ages, default=None)


def retry_after(levels: "QueueLevels | TenantLevel", excess: int) -> float | None:
    """Estimates in how many seconds `excess` requests will have left the queue; None where nothing tells.

    Little's law: a queue whose first request waited `oldest_age_seconds` behind as many as now wait behind it moves
    by `num_ready` in that time.
    """
    if levels.oldest_age_seconds is None or not levels.num_ready:
        return None
    return min(max(levels.oldest_age_seconds * excess / levels.num_ready, 1.0), _LONGEST_RETRY_SECONDS)
