"""`read_outstanding_tokens`: how many tokens a queue's messages will cost, estimated from requests that have ended.

For autoscalers. It works without a running worker, and with a Redis user that may only read.
"""

from typing import Final

import redis

from headrace_broker.keys import (
    arrived_key,
    delayed_key,
    held_key,
    queue_lists,
    sorted_ids_key,
)
from headrace_broker.scripts import script

_OUTSTANDING_TOKENS: Final = script("key_checks", "outstanding_tokens")


def read_outstanding_tokens(client: "redis.Redis", queue: str) -> dict[str, float] | None:
    """Estimate the tokens of the queue's messages by state: `waiting` and `leased`.

    Tokens are those of prompts, cached ones included, and of outputs. A waiting message is expected to cost the moving
    average of its tenant's requests. If it is not sorted yet, or its tenant has no average, it is expected to cost the
    queue's average. A leased message counts with the queue's average, whatever part of it is computed already. Messages
    that are not due do not count.

    The result is None if there are messages and no request of the queue has ended in the last day. The run time does
    not grow with the number of messages, nor with more than a thousand tenants. Redis's errors pass through.
    """
    lists = queue_lists(queue)
    tokens = _OUTSTANDING_TOKENS.read(
        client,
        queue=queue,
        list=lists,
        arrived=[*map(arrived_key, lists)],
        sorted_ids=[*map(sorted_ids_key, lists)],
        held=[*map(held_key, lists)],
        delayed=[*map(delayed_key, lists)],
    )
    return dict(zip(("waiting", "leased"), map(float, tokens), strict=True)) if tokens else None
