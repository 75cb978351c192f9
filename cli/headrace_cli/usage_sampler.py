"""`UsageSampler`: the exporter's view of the usage ledger."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Final

import redis

from headrace_broker.usage.ledger import DAY, UsageCounts, read_usage

INTERVAL_SECONDS: Final = 30.0
"""Between two readings of a server. One reads all rows of the day, which are 24,000 at most."""


class UsageSampler:
    """Sums the requests that ended since 00:00 UTC by model. Redis's errors pass through. Without the right to read the
    ledger, there are none.

    Args:
        clock: returns the unix time in seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock: Final = clock
        self._found: Final[dict[redis.Redis, tuple[float, Mapping[str, UsageCounts]]]] = {}
        """By server: when it was read last, and its sums by model."""

    def read(self, server: "redis.Redis") -> Mapping[str, UsageCounts]:
        """Return the sums of the server's queues by model, as old as `INTERVAL_SECONDS` at most."""
        now = self._clock()
        today = int(now) // DAY * DAY
        read_at, sums = self._found.get(server, (0.0, {}))
        if read_at < today or not 0 <= now - read_at < INTERVAL_SECONDS:  # negative if the clock was set back
            try:
                sums = _by_model(server, today)
            except redis.exceptions.NoPermissionError:  # other metrics need less
                sums = {}
            self._found[server] = now, sums
        return sums


def _by_model(server: "redis.Redis", today: int) -> dict[str, UsageCounts]:
    sums: defaultdict[str, UsageCounts] = defaultdict(UsageCounts)
    for group, counts in read_usage([server], DAY, today, today + DAY).items():
        sums[group.model] = sums[group.model].plus(counts)
    return dict(sums)
