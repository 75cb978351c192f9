"""Lists of a queue that kombu's settings at a producer name otherwise than the workers.

A producer with `priority_steps` of its own uses lists of further priority steps. `gather_steps` moves their messages to
the lists that workers read. With another `sep`, or a `global_keyprefix`, a list has a name that nobody reads:
`unread_lists` finds it.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from headrace_broker.keys import ALL_STEPS, PRIORITY_SEPARATOR, queue_lists, queue_name, wake_up_key
from headrace_broker.models.registry import known_models
from headrace_broker.scripts import script
from headrace_wire.codes import PRIORITY_STEPS

if TYPE_CHECKING:
    import redis

_GATHER: Final = script("steps_gather")
_MOVED_AT_ONCE: Final = 500
_SCANNED_AT_ONCE: Final = 1000
_GLOB: Final = re.compile(r"[*?\[\]\\^]")
_STEPS: Final = range(1, ALL_STEPS)


def _steps_between(queue: str) -> dict[str, str]:
    """Return the lists of the steps between those that workers read, each with the list that serves it."""
    served = dict(zip(PRIORITY_STEPS, queue_lists(queue), strict=True))
    return {
        f"{queue}{PRIORITY_SEPARATOR}{step}": served[max(better for better in PRIORITY_STEPS if better < step)]
        for step in _STEPS
        if step not in served
    }


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
    gather = _GATHER.bound(client)  # a client's LMOVE would read all messages
    return sum(gather(_MOVED_AT_ONCE, key=source, list=targets[source]) for source in _lengths(client, targets))


def separated_lists(client: "redis.Redis", queues: Iterable[str]) -> dict[str, int]:
    """Return the lists of producers with the separator of Celery's documentation, `sep` `:`, with their lengths.

    No worker reads them, as such a name may be the queue of another model. Keys of other types are left out.
    """
    names = [f"{queue}:{step}" for queue in queues for step in _STEPS]
    found = _lengths(client, names)
    others = {queue_name(model) for model in known_models(client)} if found else set()
    return {name: length for name, length in found.items() if name not in others}


def unread_lists(client: "redis.Redis", queue: str, others: Sequence[str] = ()) -> dict[str, int]:
    """Find the lists that look like those of the queue and are read by no worker, with their lengths.

    Scans all keys of the database, in small steps. Redis's errors pass through.

    Args:
        others: queues of other models, which are read.
    """
    read = {name for other in (queue, *others) for name in (*queue_lists(other), *_steps_between(other))}
    looks_alike = re.compile(rf"(.*[^A-Za-z0-9._-])?{re.escape(queue)}(\D{{1,4}}\d)?", re.DOTALL)
    pattern = "*" + _GLOB.sub(lambda found: "\\" + found[0], queue) + "*"
    found: dict[str, int] = {}
    for key in client.scan_iter(match=pattern, count=_SCANNED_AT_ONCE, _type="list"):
        name = key.decode(errors="replace")
        if looks_alike.fullmatch(name) and name not in read and name != wake_up_key(queue):
            found[name] = client.llen(key)
    return dict(sorted(found.items()))
