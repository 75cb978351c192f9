"""`is_known`: whether Redis has the stream, the result or the message of a request.

The search reads all waiting messages, so it is for an operator's question and not for every request.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import redis

from headrace_broker.errors import SettingsError, StreamServerUnavailableError
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
from headrace_broker.server.asking_homes import ask_homes
from headrace_broker.server.queue_servers import ClientOf, client_of_queue
from headrace_broker.server.shards import id_in_keys
from headrace_broker.server.stream_servers import StreamServers
from headrace_broker.server.stream_table import MAIN

_FIND: Final = script("queue_find")


def is_known(
    client: "redis.Redis",
    request_id: str,
    queues: Iterable[str],
    servers: "redis.Redis | ClientOf | None" = None,
    streams: StreamServers | None = None,
) -> bool:
    """Return whether the request has a stream, an `ended` key, a result, or a message in one of the queues.

    `client` is the server of results. `servers` is that of all queues, or a function that returns the client of a
    queue's server; without it, `client`. `streams` are the servers of streams; without them, `client`.

    Redis's errors pass through, including the one for a user that may not read messages. Raises
    StreamServerUnavailableError if nothing is found, and a stream server that may have the stream is away.
    """
    homes = [] if streams is None else [home for home in streams.homes_now(request_id) if home != MAIN]

    def find(home: str, server: "redis.Redis") -> bool | None:
        return bool(server.exists(*_traces(id_in_keys(home, request_id)))) or None

    def has_traces() -> bool:
        if client.exists(*_traces(request_id)):
            return True
        return streams is not None and bool(ask_homes(streams, homes, find, "look for a request", first=True))

    # the last search raises these errors if no message is found either
    with suppress(StreamServerUnavailableError, SettingsError):
        if has_traces():
            return True
    text = json.dumps(request_id)
    client_of = client_of_queue(client if servers is None else servers)
    lists = [(queue, name) for queue in queues for name in queue_lists(queue)]
    # in the order in which a message moves through these places: one that moves during the search is still found, also
    # one that returns to its list after it woke a worker
    for place in (arrived_key, str, arrived_key, sorted_ids_key, delayed_key, held_key):
        for queue, name in lists:
            server = client_of(queue)
            found, at = 0, 0
            while at >= 0 and not found:
                found, at = _FIND.read(server, text, str(at), queue=queue, key=place(name))
            if found:
                return True
    return has_traces()


def _traces(name: str) -> tuple[str, str, str]:
    """Return the keys that a request may leave. `name` is its id in the keys of a server."""
    return stream_key(name), ended_key(name), result_key(name)
