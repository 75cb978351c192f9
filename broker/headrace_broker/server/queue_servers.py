"""`QueueServers`: clients of the servers that have the queues. `HEADRACE_QUEUE_URLS` puts queues on other servers.

A queue's server has its lists, leases, fair share and dead letters. Streams, results and everything else are on the
server of `HEADRACE_REDIS_URL`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Self, TypeAlias

import redis

from headrace_broker.server.connections import connect

OTHER_TIMEOUT: Final = 2.0
"""Seconds that a worker waits for another server than the main one: shorter, because it keeps all queues waiting."""

ClientOf: TypeAlias = "Callable[[str], redis.Redis]"
"""Returns the client of a queue's server."""


def client_of_queue(client: "redis.Redis | ClientOf") -> ClientOf:
    """Return the function itself, or one that returns the only client."""
    return (lambda _queue: client) if isinstance(client, redis.Redis) else client


class QueueServers:
    """Threads may share it.

    Args:
        client: the client of `HEADRACE_REDIS_URL`, which is not closed here.
        urls: by queue on another server: its URL.
        options: `retries` and `timeout`, as in `connect`.
    """

    def __init__(self, client: "redis.Redis", urls: Mapping[str, str], **options: Any) -> None:
        self._client: Final = client
        self._urls: Final = dict(urls)
        self._others: Final = {url: connect(url, **options) for url in set(urls.values())}

    def __iter__(self) -> "Iterator[redis.Redis]":
        """Return the clients of all servers, that of `HEADRACE_REDIS_URL` first."""
        return iter([self._client, *self._others.values()])

    def of(self, queue: str) -> "redis.Redis":
        """Return the client of the queue's server."""
        url = self._urls.get(queue)
        return self._client if url is None else self._others[url]

    def by_server(self, queues: Iterable[str]) -> "list[tuple[redis.Redis, list[str]]]":
        """Return the clients of these queues' servers, each with its queues."""
        found: dict[redis.Redis, list[str]] = {}
        for queue in queues:
            found.setdefault(self.of(queue), []).append(queue)
        return list(found.items())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections to the other servers."""
        for client in self._others.values():
            client.close()
