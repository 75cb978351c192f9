"""`StreamServers`: clients of the servers that have the streams. `HEADRACE_STREAM_URLS` has the URLs of those besides
the main one.

A server that is a Redis Cluster has a home for each shard (`shards.py`), and a client for each home.

The main server, that of `HEADRACE_REDIS_URL`, has the table of the stream servers, and all streams that were placed
before the first row of the table. A stream's server has its stream, the key that tells of its end, its subscriber
heartbeats and its engine losses. Results and everything else are on the main server.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Generic, Self, TypeVar

import redis
import redis.asyncio

from headrace_broker.errors import SettingsError
from headrace_broker.keys import STREAM_SERVER_ID_KEY, STREAM_SERVERS_KEY
from headrace_broker.server.connections import (
    address_of,
    connect,
    connect_async,
    connect_cluster,
    connect_cluster_async,
)
from headrace_broker.server.shards import SHARDS, server_of, shard_of
from headrace_broker.server.stream_table import EMPTY_TABLE, LOOK_BACK_SECONDS, MAIN, StreamTable
from headrace_broker.server.url import ServerUrl

logger = logging.getLogger(__name__)

TABLE_SECONDS: Final = 2.0
"""How long a table that was read is used."""

ClientT = TypeVar("ClientT", "redis.Redis", "redis.asyncio.Redis")


class _Servers(Generic[ClientT]):
    """What both kinds of clients have in common. Does no I/O.

    Args:
        client: the client of the main server, which is not closed here.
        others: clients by home: by the name of their stream server, and by the shards of a Redis Cluster. The client
            of a Cluster's name serves the key with the id of the server.
        ttl_seconds: the life of a stream after its last entry.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        client: ClientT,
        others: Mapping[str, ClientT],
        ttl_seconds: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.main: Final[ClientT] = client
        self._others: Final[dict[str, ClientT]] = dict(others)
        self.names: Final = [home for home in self._others if home == server_of(home)]
        """The names that have a URL."""
        self._look_back: Final = LOOK_BACK_SECONDS + ttl_seconds
        self._clock: Final = clock
        self.table = EMPTY_TABLE
        """The table as it was read last."""
        self._read_at: float | None = None
        self._identified: Final[set[tuple[str, str]]] = set()
        """Names and ids of the servers that had the id of their row."""
        self._reported: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[ClientT]:
        """Return the clients of all servers, the main one first."""
        yield self.main
        yield from self._others.values()

    def is_cluster(self, name: str) -> bool:
        """Return whether the URL of a server is that of a Redis Cluster."""
        return name + SHARDS[0] in self._others

    def homes_of(self, name: str) -> list[str]:
        """Return the homes of a server: its shards if it is a Redis Cluster, else itself."""
        return [name + shard for shard in SHARDS] if self.is_cluster(name) else [name]

    def home_at(self, name: str, request_id: str) -> str:
        """Return the home of a request at the server with this name, or its newest home if that server is lost."""
        if self.is_lost(name):
            return self.known_homes(request_id)[0]
        return name + shard_of(request_id) if self.is_cluster(name) else name

    @property
    def is_single(self) -> bool:
        """Whether all streams are on the main server, as far as it is known."""
        return not (self._others or self.table.rows)

    def client(self, home: str) -> ClientT:
        """Return the client of a stream server. Raises SettingsError if its name has no URL."""
        if home == MAIN:
            return self.main
        if home not in self._others:
            raise SettingsError(self.missing_url(server_of(home)))
        return self._others[home]

    def missing_url(self, name: str) -> str:
        """Say that a name of the table has no URL."""
        given = ", ".join(self.names) or "none"
        return (
            f"HEADRACE_STREAM_URLS must have the URL of each stream server that `headrace streams list` shows: {name}"
            f" has none; given are {given}"
        )

    def without_url(self) -> list[str]:
        """Return the names of the table that have no URL, and need one."""
        return [name for name, row in self.table.rows.items() if name not in self._others and not row.is_lost]

    def is_lost(self, home: str) -> bool:
        """Return whether the streams of a home are lost, by the table as it was read last."""
        row = self.table.rows.get(server_of(home))
        return row is not None and row.is_lost

    def lost_at(self, home: str) -> float | None:
        """Return when a home lost its streams last, by the table as it was read last; None: it never did."""
        row = self.table.rows.get(server_of(home))
        return None if row is None else row.lost

    def _is_fresh(self) -> bool:
        return self._read_at is not None and self._clock() - self._read_at < TABLE_SECONDS

    def _take(self, fields: Mapping[bytes, bytes]) -> None:
        self.table = StreamTable.read(fields)
        self._read_at = self._clock()
        if self.table.unreadable != self._reported:
            self._reported = self.table.unreadable
            if self._reported:
                logger.warning("fields of %s ignored: %s", STREAM_SERVERS_KEY, ", ".join(self._reported))

    def _forbidden(self, error: redis.exceptions.NoPermissionError) -> None:
        """Take the table to be empty for a user of an older users.acl file. Raises the error if URLs were given."""
        if self._others:
            raise error
        self._take({})

    def known_homes(self, request_id: str) -> list[str]:
        """Return the servers that may have the request's stream by the table as it was read last, the newest first."""
        if not self.table.rows:
            return [MAIN]
        names = self.table.homes(request_id, (time.time() - self._look_back) * 1000)
        return [self.home_at(name, request_id) for name in names]

    def checked_homes(self, request_id: str) -> list[str]:
        """Return the same. Raises SettingsError if a name of the table has no URL."""
        for name in self.without_url():
            raise SettingsError(self.missing_url(name))
        return self.known_homes(request_id)

    def _unidentified(self, name: str) -> str | None:
        """Return the id that the server must have, if this was not checked yet.

        Raises SettingsError if its URL is of another kind than its row says: the keys would have other names.
        """
        row = self.table.rows.get(name)
        if row is None or (name, row.server_id) in self._identified:
            return None
        if name in self._others and row.is_cluster != self.is_cluster(name):
            is_one = (
                "is a Redis Cluster, whose URL begins with redis+cluster://"
                if row.is_cluster
                else ("is no Redis Cluster, whose URL would begin with redis+cluster://")
            )
            raise SettingsError(f"by the table of stream servers, {name} {is_one}: correct HEADRACE_STREAM_URLS")
        return row.server_id

    def _identify(self, home: str, expected: str, found: bytes | None) -> None:
        """Raises SettingsError if the server has another id."""
        if found is None or found.decode(errors="replace") != expected:
            has = "no id" if found is None else f"the id {found.decode(errors='replace')!r}"
            raise SettingsError(
                f"the URL of {home} in HEADRACE_STREAM_URLS leads to another server: it has {has}, and the table has"
                f" {expected!r}; correct the URL, or run `headrace streams add {home}` if the server has lost its data"
            )
        self._identified.add((home, expected))

    def check_again(self, home: str) -> None:
        """Check the server's id at its next use, because the connection was lost: its URL may lead elsewhere now."""
        name = server_of(home)
        self._identified.difference_update([pair for pair in self._identified if pair[0] == name])


class StreamServers(_Servers["redis.Redis"]):
    """Threads may share it. Redis's errors pass through."""

    @classmethod
    def connected(cls, client: "redis.Redis", urls: Mapping[str, str], ttl_seconds: int, **options: Any) -> Self:
        """Make the clients of these URLs by name. `options` are `retries` and `timeout`, as in `connect`."""
        clients: dict[str, redis.Redis] = {}
        for name, url in urls.items():
            if _is_cluster_url(url):
                homes, keys = _cluster_homes(name)
                clients |= zip(homes, connect_cluster(url, keys, **options), strict=True)
            else:
                clients[name] = connect(url, **options)
        return cls(client, clients, ttl_seconds)

    def refresh(self) -> StreamTable:
        """Read the table now."""
        try:
            found: Any = self.main.hgetall(STREAM_SERVERS_KEY)
            self._take(found)
        except redis.exceptions.NoPermissionError as error:
            self._forbidden(error)
        return self.table

    def of(self, home: str) -> "redis.Redis":
        """Return the client of a stream server.

        Raises SettingsError if its name has no URL, or if the URL leads to another server than the row names.
        """
        client, name = self.client(home), server_of(home)
        expected = self._unidentified(name)
        if expected is not None:
            self._identify(name, expected, self.client(name).get(STREAM_SERVER_ID_KEY))  # type: ignore[arg-type]
        return client

    def nodes(self, name: str) -> "dict[str, redis.Redis]":
        """Return a client by address for each master of a Redis Cluster; for another server, its client."""
        clients = [self.client(home) for home in self.homes_of(name)]
        if len(clients) > 1:
            for client in clients:
                client.ping()  # shows where each connects
        return {address_of(client): client for client in clients}

    def homes(self, request_id: str) -> list[str]:
        """Return the servers that may have the request's stream, the newest home first.

        The table may be two seconds old. Raises SettingsError if a name of the table has no URL.
        """
        if not self._is_fresh():
            self.refresh()
        return self.checked_homes(request_id)

    def homes_now(self, request_id: str) -> list[str]:
        """Return the same for a call that does not look again later: by the table as it is now, if there are URLs."""
        if self._others or not self._is_fresh():
            self.refresh()
        return self.checked_homes(request_id)

    def by_home(self, request_ids: Iterable[str]) -> dict[str, list[str]]:
        """Return these requests by the servers that may have their streams, as `homes_now` does."""
        if self._others or not self._is_fresh():
            self.refresh()
        return _by_home(self.checked_homes, request_ids)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections to all servers but the main one."""
        for client in self._others.values():
            client.close()


class AsyncStreamServers(_Servers["redis.asyncio.Redis"]):
    """`StreamServers` for asyncio. It belongs to one event loop."""

    _reading: asyncio.Task[StreamTable] | None = None

    @classmethod
    def connected(
        cls, client: "redis.asyncio.Redis", urls: Mapping[str, str], ttl_seconds: int, **options: Any
    ) -> Self:
        clients: dict[str, redis.asyncio.Redis] = {}
        for name, url in urls.items():
            if _is_cluster_url(url):
                homes, keys = _cluster_homes(name)
                clients |= zip(homes, connect_cluster_async(url, keys, **options), strict=True)
            else:
                clients[name] = connect_async(url, **options)
        return cls(client, clients, ttl_seconds)

    async def refresh(self) -> StreamTable:
        try:
            found: Any = await self.main.hgetall(STREAM_SERVERS_KEY)
            self._take(found)
        except redis.exceptions.NoPermissionError as error:
            self._forbidden(error)
        return self.table

    async def of(self, home: str) -> "redis.asyncio.Redis":
        client, name = self.client(home), server_of(home)
        expected = self._unidentified(name)
        if expected is not None:
            found: Any = await self.client(name).get(STREAM_SERVER_ID_KEY)
            self._identify(name, expected, found)
        return client

    async def of_table(self) -> StreamTable:
        """Return the table, which is read again if it is not fresh. Concurrent calls share one read."""
        if self._is_fresh():
            return self.table
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self.refresh(), name="stream servers")
        return await asyncio.shield(self._reading)

    async def identify(self, home: str) -> None:
        """Check that the URL of a server leads to the server of its row, although that was checked before."""
        self.check_again(home)
        await self.of(home)

    async def homes(self, request_id: str) -> list[str]:
        await self.of_table()
        return self.checked_homes(request_id)

    async def homes_now(self, request_id: str) -> list[str]:
        if self._others or not self._is_fresh():
            await self.refresh()
        return self.checked_homes(request_id)

    async def by_home(self, request_ids: Iterable[str]) -> dict[str, list[str]]:
        if self._others or not self._is_fresh():
            await self.refresh()
        return _by_home(self.checked_homes, request_ids)

    async def aclose(self) -> None:
        for client in self._others.values():
            await client.aclose()


def _by_home(homes: Callable[[str], list[str]], request_ids: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for request_id in request_ids:
        for home in homes(request_id):
            found.setdefault(home, []).append(request_id)
    return found


def _is_cluster_url(url: str) -> bool:
    return ServerUrl.parse(url, may_be_cluster=True).kind == "cluster"


def _cluster_homes(name: str) -> tuple[list[str], list[str]]:
    """Return the homes of a Redis Cluster that have clients, and for each a key in the slot that its client serves."""
    return [name, *(name + shard for shard in SHARDS)], [STREAM_SERVER_ID_KEY, *SHARDS]
