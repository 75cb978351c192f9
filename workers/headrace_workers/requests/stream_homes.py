"""`StreamHomes`: the stream servers as this worker sees them: a writer for each, and which of them are away.

A server is away after it could not be reached, has refused a write, or has not answered for a step. Its entries wait in
`publisher.py`, and messages whose requests have their streams there stay in the queue, or return to it at their place.
The main server, that of `HEADRACE_REDIS_URL`, is never away here: without it the worker has no queue either.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import redis
import structlog

from headrace_broker.client.submission import STREAM_STATUS, read_status
from headrace_broker.errors import SettingsError
from headrace_broker.keys import stream_key
from headrace_broker.server.connections import REDIS_ERRORS, is_fault_of_server
from headrace_broker.server.shards import id_in_keys, server_of
from headrace_broker.server.stream_servers import TABLE_SECONDS, StreamServers
from headrace_broker.server.stream_table import MAIN
from headrace_broker.streams.writer import StreamWriter

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)

STREAM_TIMEOUT: Final = 0.5
"""Seconds that a worker waits for a stream server's reply to a single command: all requests of the worker wait."""
_SHORTEST_DELAY: Final = 1.0
_LONGEST_DELAY: Final = 8.0
"""A claim for a server that is away is postponed by 1, 2, 4, then 8 s."""
_UNUSED_TABLE_SECONDS: Final = 10.0
"""How often the table is read while neither it nor the settings name a server."""
_QUICK_SECONDS: Final = 0.1
"""A server that refuses a try within this time is tried each second; one that costs more time, after the delay."""


class StreamServerAwayError(redis.ConnectionError):
    """The stream server is away, or this worker has no URL of it."""


@dataclass(slots=True)
class _Outage:
    because: str
    delay: float
    retry_at: float
    was_disconnected: bool = False
    """Whether the connection was lost. Otherwise the server was only late."""


class StreamHomes:
    """Runs on the thread of Celery's event loop only. `home` is the name of a stream server, or a shard of one that is
    a Redis Cluster; '' is the main server. Each shard can be away by itself.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, servers: StreamServers, ttl_seconds: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.servers: Final = servers
        self._ttl_seconds: Final = ttl_seconds
        self._clock: Final = clock
        self.main: Final = StreamWriter(servers.main, ttl_seconds)
        self._writers: Final[dict[str, StreamWriter]] = {MAIN: self.main}
        self._outages: Final[dict[str, _Outage]] = {}
        self._refused: Final[dict[str, str]] = {}
        """Servers whose URL leads to another server, and the reason."""
        self._table_due_at = -math.inf
        self._losses: Final[dict[str, int]] = {}
        """When the streams of a server were lost last, by the tables read so far."""

    def client(self, home: str) -> "redis.Redis":
        return self.servers.client(home)

    def writer(self, home: str) -> StreamWriter:
        """Return the writer of a server, also while it is away."""
        if home not in self._writers:
            self._writers[home] = StreamWriter(self.servers.client(home), self._ttl_seconds, home)
        return self._writers[home]

    @contextmanager
    def writing(self, home: str) -> Iterator[StreamWriter]:
        """Yield the writer of a server that is not away. An error in the block may show that the server is away.

        Raises:
            StreamServerAwayError: the server is away.
        """
        reason = self.away_because(home)
        if reason is not None:
            raise StreamServerAwayError(reason)
        started = self._clock()
        try:
            yield self.writer(home)
        except REDIS_ERRORS as error:
            self.failed(home, error, self._clock() - started)
            raise

    # -- which servers are away -----------------------------------------------------------------------------------

    def away(self) -> set[str]:
        """Return the servers to which this worker cannot write now: none of their homes."""
        partly = {server_of(home) for home in self._outages if home != MAIN}
        wholly = (name for name in partly if self._outages.keys() >= {*self.servers.homes_of(name)})
        return {*wholly, *self._refused, *self.servers.without_url()}

    def is_away(self, home: str) -> bool:
        return home != MAIN and self.away_because(home) is not None

    def away_because(self, home: str) -> str | None:
        """Return why this worker cannot write to the server; None if it can."""
        if home == MAIN:
            return None
        name = server_of(home)
        if name not in self.servers.names:
            if not self.servers.table.rows:
                self._table_due_at = -math.inf  # it was empty when it was read last
            return self.servers.missing_url(name)
        if name in self._refused:
            return self._refused[name]
        outage = self._outages.get(home)
        return None if outage is None else f"the stream server {home} is away: {outage.because}"

    def delay(self, home: str) -> float:
        """Return the seconds by which a message is postponed whose stream server is away."""
        outage = self._outages.get(home)
        return _SHORTEST_DELAY if outage is None else outage.delay

    def failed(self, home: str, error: Exception, seconds: float = 0.0) -> None:
        """Take note of an error of a server, after a try that took these seconds."""
        if home == MAIN or isinstance(error, StreamServerAwayError) or not is_fault_of_server(error):
            return
        outage = self._outages.get(home)
        if outage is None:
            logger.warning("stream server away", stream_server=home, error=str(error))
            outage = self._outages[home] = _Outage(str(error), _SHORTEST_DELAY, 0.0)
        elif self._clock() >= outage.retry_at:
            outage.delay = min(_LONGEST_DELAY, 2 * outage.delay)
        outage.was_disconnected |= not isinstance(error, redis.TimeoutError)
        outage.retry_at = self._clock() + (_SHORTEST_DELAY if seconds < _QUICK_SECONDS else outage.delay)

    def is_due(self, home: str) -> bool:
        """Return whether a server that is away is to be tried again now; true for one that is not away."""
        outage = self._outages.get(home)
        return server_of(home) not in self._refused and (outage is None or self._clock() >= outage.retry_at)

    def is_back(self, home: str) -> None:
        """Take note that a server has accepted a write."""
        outage = self._outages.pop(home, None)
        if outage is None:
            return
        logger.info("stream server back", stream_server=home)
        if outage.was_disconnected:  # its URL may lead elsewhere now
            self.servers.check_again(home)
            self._identify([server_of(home)])

    def probe(self, behind: Collection[str]) -> None:
        """Try a write on each server that is away and due, except those whose entries wait: they are tried by those."""
        for home in [home for home in self._outages if home not in behind]:
            if self.is_due(home):
                started = self._clock()
                if self.writer(home).takes_writes():
                    self.is_back(home)
                else:
                    self.failed(home, redis.ConnectionError("no answer"), self._clock() - started)

    # -- the table ------------------------------------------------------------------------------------------------

    def refresh(self, *, is_reconnected: bool = False) -> None:
        """Read the table of stream servers if it is time for it, and check the ids of those that are new.

        Pass `is_reconnected` after each new connection to the main server: its URL may lead to another server.
        """
        if not is_reconnected and self._clock() < self._table_due_at:
            return
        try:
            table = self.servers.refresh()
        except REDIS_ERRORS as error:
            self._table_due_at = self._clock() + TABLE_SECONDS
            logger.warning("stream servers not read", error=str(error))
            return
        is_used = self.servers.names or table.rows
        self._table_due_at = self._clock() + (TABLE_SECONDS if is_used else _UNUSED_TABLE_SECONDS)
        self._identify(name for name, row in table.rows.items() if not row.is_lost)
        for home in [home for home in self._outages if self.servers.is_lost(home)]:
            del self._outages[home]

    def newly_lost(self) -> set[str]:
        """Return the homes that have lost their streams since the last call."""
        losses = {name: row.lost for name, row in self.servers.table.rows.items() if row.lost is not None}
        found = [name for name, lost in losses.items() if self._losses.get(name) != lost]
        self._losses.update(losses)
        return {home for name in found if name in self.servers.names for home in self.servers.homes_of(name)}

    def _identify(self, names: Iterable[str]) -> None:
        away = self.away()
        for name in names:
            if name not in self.servers.names or (name in away and name not in self._refused):
                continue
            started = self._clock()
            try:
                self.servers.of(name)
            except SettingsError as error:
                if name not in self._refused:
                    logger.error("stream server refused", stream_server=name, reason=str(error))
                self._refused[name] = str(error)
            except REDIS_ERRORS as error:
                for home in self.servers.homes_of(name):
                    self.failed(home, error, self._clock() - started)
            else:
                self._refused.pop(name, None)

    @property
    def problem(self) -> str | None:
        """Why the worker must take no messages: the table has a server without a URL. None: it may take messages."""
        return next(map(self.servers.missing_url, self.servers.without_url()), None)

    def home_of_ended(self, request_id: str, home: str) -> str:
        """Return the home at which a request has ended already, or else its recorded home.

        The stream may be on another server than the recorded one if the table has changed: the request was cancelled
        before its message was sorted, or its message was sent twice.
        """
        if self.servers.is_single:
            return home
        for other in self.servers.known_homes(request_id):
            if other == home or self.is_away(other):
                continue
            try:
                with self.writing(other):
                    status = STREAM_STATUS.bound(self.client(other))(stream=stream_key(id_in_keys(other, request_id)))
            except REDIS_ERRORS as error:
                logger.warning("other stream server not read", stream_server=other, error=str(error))
                continue
            if read_status(status).state == "finished":
                return other
        return home
