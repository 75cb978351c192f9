"""What the usage ledger says of a round's requests, and what their results say."""

from collections.abc import Iterable
from typing import Any

import redis

from headrace_broker.usage.ledger import DAY, UsageCounts, read_usage

_NAMES = ("prompt_tokens", "cached_tokens", "completion_tokens")


def counted(client: "redis.Redis", key_name: str) -> tuple[int, ...]:
    """Requests, prompt tokens, cached tokens and completion tokens of the ledger's rows with this key's name."""
    now = int(client.time()[0])  # type: ignore[index]
    sums = UsageCounts()
    for group, counts in read_usage([client], DAY, now - 2 * DAY, now + DAY).items():
        if group.key_name == key_name:
            sums = sums.plus(counts)
    return (sums.requests, *(getattr(sums, name) for name in _NAMES))


def told(results: Iterable[Any]) -> tuple[int, ...]:
    """The same by the results."""
    usages = [result["usage"] or dict.fromkeys(_NAMES, 0) for result in results]
    return (len(usages), *(sum(usage[name] for usage in usages) for name in _NAMES))
