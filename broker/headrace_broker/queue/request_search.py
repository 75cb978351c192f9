"""`is_known`: whether Redis has the stream, the result or the message of a request.

The search reads all waiting messages, so it is for an operator's question and not for every request.
"""

import json
from collections.abc import Iterable
from typing import Final

import redis

from headrace_broker.keys import (
    arrived_key,
    delayed_key,
    ended_key,
    held_key,
    queue_lists,
    result_key,
    sorted_ids_key,
    stream_key,
)
from headrace_broker.scripts import script

_FIND: Final = script("queue_find")


def is_known(client: "redis.Redis", request_id: str, queues: Iterable[str]) -> bool:
    """Return whether the request has a stream, an `ended` key, a result, or a message in one of the queues.

    Redis's errors pass through, including the one for a user that may not read messages.
    """
    traces = (stream_key(request_id), ended_key(request_id), result_key(request_id))
    if client.exists(*traces):
        return True
    text = json.dumps(request_id)
    lists = [name for queue in queues for name in queue_lists(queue)]
    # in the order in which a message moves through these places: one that moves during the search is still found, also
    # one that returns to its list after it woke a worker
    for place in (arrived_key, str, arrived_key, sorted_ids_key, delayed_key, held_key):
        for name in lists:
            found, at = 0, 0
            while at >= 0 and not found:
                found, at = _FIND.read(client, text, str(at), key=place(name))
            if found:
                return True
    return bool(client.exists(*traces))
