"""Asks the servers that may have the stream of a request, of which some may be away.

After a change of the table a request has several possible homes. Its stream is at one of them, so an answer from that
one is enough.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from functools import partial
from typing import Final, TypeVar

import redis
import redis.asyncio

from headrace_broker.errors import SettingsError, StreamServerUnavailableError
from headrace_broker.keys import ended_key, stream_key
from headrace_broker.server.connections import REDIS_ERRORS, address_of
from headrace_broker.server.queue_servers import OTHER_TIMEOUT
from headrace_broker.server.shards import id_in_keys
from headrace_broker.server.stream_servers import AsyncStreamServers, StreamServers
from headrace_broker.server.stream_table import MAIN

T = TypeVar("T")


@contextmanager
def unless_away(home: str, note: Callable[[Exception], object] = lambda _error: None) -> Iterator[None]:
    """Pass over a stream server that fails, and note its error. Missing rights pass through.

    For a call that may be left out there.
    """
    try:
        yield
    except redis.exceptions.NoPermissionError:
        raise
    except (*REDIS_ERRORS, SettingsError) as error:
        if home == MAIN:
            raise
        note(error)


@asynccontextmanager
async def unless_away_async(home: str) -> AsyncIterator[None]:
    """Do the same for asyncio, and wait for a stream server for two seconds at most."""
    with unless_away(home):
        async with at_most_briefly(home):
            yield


def at_most_briefly(home: str) -> asyncio.Timeout:
    """Return a limit of two seconds, in which a stream server must answer. The main server has its own."""
    return asyncio.timeout(None if home == MAIN else OTHER_TIMEOUT)


def ask_homes(
    servers: StreamServers,
    homes: Iterable[str],
    ask: "Callable[[str, redis.Redis], T | None]",
    action: str,
    *,
    first: bool = False,
) -> dict[str, T]:
    """Ask each server and return the answers that are not None, by home. A server that is away is passed over.

    If no server has an answer and one was away, raises StreamServerUnavailableError; SettingsError if the URL of that
    one leads to another server. Errors of the main server, and missing rights, pass through.

    Args:
        ask: gets the name of a server and its client.
        action: what failed, for the error: "could not" precedes it.
        first: return after the first answer.
    """
    away, found = AwayHomes(servers, action), dict[str, T]()
    for home in homes:
        with away.noted(home):
            if (answer := ask(home, servers.of(home))) is not None:
                found[home] = answer
                if first:
                    break
    if not found:
        away.check()
    return found


async def ask_homes_async(
    servers: AsyncStreamServers,
    homes: Iterable[str],
    ask: "Callable[[str, redis.asyncio.Redis], Awaitable[T | None]]",
    action: str,
    *,
    first: bool = False,
) -> dict[str, T]:
    """Do the same for asyncio. A server that takes longer than two seconds is away.

    All servers are asked at once. With `first`, the others are asked only if the first one has no answer.
    """
    away, found, left = AwayHomes(servers, action), dict[str, T](), list(homes)

    async def ask_one(home: str) -> None:
        with away.noted(home):
            async with at_most_briefly(home):
                if (answer := await ask(home, await servers.of(home))) is not None:
                    found[home] = answer

    if first and left:
        await ask_one(left.pop(0))
    if not found:
        await asyncio.gather(*map(ask_one, left))
        if not found:
            away.check()
    return found


async def server_having(servers: AsyncStreamServers, request_id: str) -> "tuple[redis.asyncio.Redis, str]":
    """Return the client of the server that has the request's stream, or of the newest home if none has it.

    The other value is the request's id in the keys of that server.

    Raises StreamServerUnavailableError if a server that may have the stream is away, and no other has it.
    """

    async def exists(home: str, server: "redis.asyncio.Redis") -> bool | None:
        name = id_in_keys(home, request_id)
        return bool(await server.exists(stream_key(name), ended_key(name))) or None

    homes = await servers.homes_now(request_id)
    if len(homes) > 1:
        homes = [*await ask_homes_async(servers, homes, exists, "read a stream", first=True), *homes]
    async with at_most_briefly(homes[0]):
        return await servers.of(homes[0]), id_in_keys(homes[0], request_id)


class AwayHomes:
    """The stream servers that failed in one call."""

    def __init__(self, servers: StreamServers | AsyncStreamServers, action: str) -> None:
        self._servers: Final = servers
        self._action: Final = action
        self._errors: Final[dict[str, Exception]] = {}

    def noted(self, home: str) -> AbstractContextManager[None]:
        """Note the error of a stream server, and continue."""
        return unless_away(home, partial(self._errors.__setitem__, home))

    def check(self) -> None:
        """Raise the first error that was noted."""
        for home, error in self._errors.items():
            if isinstance(error, SettingsError):
                raise error
            address = address_of(self._servers.client(home))
            raise StreamServerUnavailableError(home, address, self._action, error) from error
