"""Finds lists of messages whose names workers do not know, because a producer's settings of kombu differ from theirs.

A producer with `priority_steps` of its own uses lists of further priority steps. `gather_steps` moves their messages to
the lists that workers read. With another `sep`, or a `global_keyprefix`, a list has a name that no worker reads.
`UnreadListSearch` finds such lists. A producer without `HEADRACE_QUEUE_URLS` sends the messages of all queues to the
main server. `lists_on_main` finds those of queues that are on other servers.
"""

import re
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, Final

from headrace_broker.keys import (
    ALL_STEPS,
    PRIORITY_SEPARATOR,
    QUEUE_PREFIX,
    arrived_key,
    queue_lists,
    queue_name,
    wake_up_key,
)
from headrace_broker.models.registry import known_models
from headrace_broker.scripts import script
from headrace_wire.codes import PRIORITY_STEPS

if TYPE_CHECKING:
    import redis

_GATHER: Final = script("steps_gather")
_MOVED_AT_ONCE: Final = 500
_SCANNED_AT_ONCE: Final = 10_000
_MOST_LISTS: Final = 100
"""Of a queue: any producer may make lists."""
_STEPS: Final = range(1, ALL_STEPS)


def _steps_between(queue: str) -> dict[str, str]:
    """Return the lists of the steps that workers do not read, each with the list to which its messages are moved."""
    served = dict(zip(PRIORITY_STEPS, queue_lists(queue), strict=True))
    return {
        f"{queue}{PRIORITY_SEPARATOR}{step}": served[max(better for better in PRIORITY_STEPS if better < step)]
        for step in _STEPS
        if step not in served
    }


def _lists_read(queue: str) -> tuple[str, ...]:
    """Return all lists of the queue that workers read."""
    lists = queue_lists(queue)
    return (*lists, *map(arrived_key, lists), *_steps_between(queue), wake_up_key(queue))


def _lengths(client: "redis.Redis", names: Collection[str]) -> dict[str, int]:
    """Return the lengths of the lists that are not empty. Keys of other types are left out."""
    pipeline = client.pipeline(transaction=False)
    for name in names:
        pipeline.llen(name)
    lengths = zip(names, pipeline.execute(raise_on_error=False), strict=True)
    return {name: length for name, length in lengths if isinstance(length, int) and length}


def gather_steps(client: "redis.Redis", queues: Iterable[str]) -> int:
    """Move messages of the other priority steps to the lists that workers read. Return how many.

    Moves up to 500 messages or a mebibyte of each step. Each message is always in one of the two lists. Keys of other
    types are left out. Other errors of Redis pass through.
    """
    targets = {source: target for queue in queues for source, target in _steps_between(queue).items()}
    gather = _GATHER.bound(client)  # a script, because LMOVE would also send each message here
    return sum(gather(_MOVED_AT_ONCE, key=source, list=targets[source]) for source in _lengths(client, targets))


def separated_lists(client: "redis.Redis", queues: Iterable[str]) -> dict[str, int]:
    """Return the lists that a producer with the separator `:` of Celery's documentation uses, with their lengths.

    No worker reads them, because such a name may be the queue of another model. Keys of other types are left out.
    """
    names = [f"{queue}:{step}" for queue in queues for step in _STEPS]
    found = _lengths(client, names)
    others = {queue_name(model) for model in known_models(client)} if found else set()
    return {name: length for name, length in found.items() if name not in others}


def lists_on_main(client: "redis.Redis", queue: str) -> dict[str, int]:
    """Return the lists that a queue of another server has on the main server, with their lengths. No worker reads them.

    Keys of other types are left out.
    """
    names = [name for name in _lists_read(queue) if name != wake_up_key(queue)]
    return _lengths(client, names) | separated_lists(client, [queue])


def remedy(queue: str, name: str) -> str:
    """Return what to do about a list of the queue that no worker reads."""
    if name in _lists_read(queue):  # workers read it on another server
        return "its producers send to the main server: set HEADRACE_QUEUE_URLS for them, or the broker_url of the queue"
    return "leave sep, global_keyprefix and priority_steps of its producers unset"


class UnreadListSearch:
    """Searches all keys of the database for lists that no worker reads and whose names contain that of a queue.

    Each step looks at 10,000 keys, which takes Redis some milliseconds.
    """

    def __init__(self, client: "redis.Redis") -> None:
        self._client: Final = client
        self._cursor = 0
        self._names: dict[str, set[str]] = {}
        self._complete: dict[str, set[str]] = {}

    def step(self, queues: Collection[str]) -> bool:
        """Look at the next keys. Return whether all have been looked at; Redis's errors pass through."""
        read = {name for queue in queues for name in _lists_read(queue)}
        found: Any = self._client.scan(self._cursor, f"*{QUEUE_PREFIX}*", _SCANNED_AT_ONCE, "list")
        self._cursor, keys = found
        for name in {key.decode(errors="replace") for key in keys} - read:
            for queue in queues:
                if len(self._names.get(queue, ())) < _MOST_LISTS and re.fullmatch(
                    rf"(.*[^A-Za-z0-9._-])?{re.escape(queue)}(\D{{1,4}}\d)?", name, re.DOTALL
                ):
                    self._names.setdefault(queue, set()).add(name)
        if self._cursor == 0:
            self._complete, self._names = self._names, {}
        return self._cursor == 0

    def lengths(self, queue: str) -> dict[str, int]:
        """Return the lists of the queue that the last complete search found, with their present lengths."""
        return _lengths(self._client, sorted(self._complete.get(queue, ())))


def unread_lists(client: "redis.Redis", queues: Collection[str]) -> dict[str, dict[str, int]]:
    """Return the lists of each queue that `UnreadListSearch` finds, with their lengths. Redis's errors pass through."""
    search = UnreadListSearch(client)
    while not search.step(queues):
        pass
    return {queue: search.lengths(queue) for queue in queues}
