"""`read_earliest_slack`: how long until the first waiting message of a queue expires.

For autoscalers and monitors. It works without a running worker, and with a Redis user that may only read.
"""

from typing import Final

import redis

from headrace_broker.keys import arrived_key, deadlines_key, queue_lists
from headrace_broker.scripts import script

_EARLIEST_DEADLINE: Final = script("key_checks", "tenant_prelude", "earliest_deadline")


def read_earliest_slack(client: "redis.Redis", queue: str) -> float | None:
    """Return the seconds until the earliest `expires` of the queue's waiting messages, by Redis's clock.

    The number is negative if that time has passed. None: no waiting message has `expires`. Messages that a worker has
    sorted all count. Of the others, only the oldest of each of the queue's lists counts. Redis's errors pass through.
    """
    lists = queue_lists(queue)
    seconds = _EARLIEST_DEADLINE.read(
        client, deadlines=deadlines_key(queue), list=lists, arrived=[*map(arrived_key, lists)]
    )
    return float(seconds) if seconds else None
