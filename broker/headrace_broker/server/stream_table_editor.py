"""Changes the table of the stream servers, for operators.

Each server of a queue has a copy of the table, because the script that sorts a message reads it there. The main server
is written first: readers use its table, and must know a server before any stream is placed on it.
"""

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import redis

from headrace_broker.errors import SettingsError
from headrace_broker.keys import STREAM_SERVER_ID_KEY, STREAM_SERVERS_KEY, lease_records_key, stream_key
from headrace_broker.packing import unpack
from headrace_broker.server.connections import REDIS_ERRORS
from headrace_broker.server.eviction import eviction_warning
from headrace_broker.server.shards import id_in_keys
from headrace_broker.server.stream_servers import StreamServers
from headrace_broker.server.stream_table import MAX_SERVERS, StreamServerRow

_SCANNED_AT_ONCE: Final = 1000
_ID_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class StreamServerState:
    """What `headrace streams list` shows of one server."""

    name: str
    state: str
    """open: gets new streams; draining: gets none, and has older ones; lost: all streams that were placed on it are
    lost; unused: has a URL, and is not in the table.
    """
    since: float | None
    """Unix seconds."""
    until: float | None
    problem: str | None
    """Why this process cannot use the server; None if it can."""


class StreamTableEditor:
    """Methods raise SettingsError if a change is not possible, and redis-py's errors.

    Args:
        servers: the clients of the stream servers and of the main server.
        queue_servers: the clients of the other servers that have queues.
    """

    def __init__(self, servers: StreamServers, queue_servers: "Iterable[redis.Redis]" = ()) -> None:
        self._servers: Final = servers
        self._tables: Final = list(dict.fromkeys([servers.main, *queue_servers]))

    def enable(self, names: Sequence[str] = ()) -> list[str]:
        """Place new streams on these servers, or all of `HEADRACE_STREAM_URLS`, from now on. Return their names."""
        if self._servers.refresh().rows:
            raise SettingsError(
                "streams are placed on stream servers already: add further ones by `headrace streams add`"
            )
        names = list(names or self._servers.names)
        if not names:
            raise SettingsError("HEADRACE_STREAM_URLS must name the stream servers, such as s1=redis://host:6379/0")
        ids = {name: self._identified(name, None) for name in names}
        now = self._now()  # the same for all, so that there was no table of some of them
        self._write({name: self._row(name, now, server_id) for name, server_id in ids.items()})
        return names

    def add(self, name: str) -> None:
        """Place new streams on this server, too.

        Streams that were placed on it before are lost if it was forgotten as lost, or if it has come back without data.
        """
        rows = self._servers.refresh().rows
        self._require_url(name)
        if not rows:
            raise SettingsError("no stream is placed on a stream server yet: run `headrace streams enable` first")
        row = rows.get(name)
        if row is not None and row.until is not None and not row.is_lost:
            raise SettingsError(f"{name} is draining: add the server under another name, or forget {name} first")
        if row is None and len(rows) >= MAX_SERVERS:
            raise SettingsError(f"the table must have at most {MAX_SERVERS} servers, and has {len(rows)}")
        is_empty = row is not None and (row.is_lost or self._has_no_id(name))
        if is_empty and (left := count_streams(self._servers, name)):
            raise SettingsError(f"the streams of {name} were lost, and it has {left}: delete its keys first")
        server_id = self._identified(name, None if row is None or row.is_lost else row.server_id)
        if row is None or is_empty:
            now = self._now()
            row = replace(self._row(name, now, server_id), lost=now if is_empty else None)
        self._write({**rows, name: row})

    def drain(self, name: str) -> None:
        """Place no new streams on this server. Its streams are read and continued."""
        rows = self._servers.refresh().rows
        row = rows.get(name)
        if row is None:
            raise SettingsError(f"the table has no server {name}; it has {', '.join(rows) or 'none'}")
        self._write({**rows, name: replace(row, until=row.until or self._now())})

    def forget(self, name: str, *, is_lost: bool = False) -> None:
        """Remove a drained or lost server from the table, once no message has its stream there, and it has no streams.

        With `is_lost`, the server is gone for good with its streams, and becomes lost in the table. Requests that had
        begun there end with the error stream_lost, and others are placed again.
        """
        rows = self._servers.refresh().rows
        row = rows.get(name)
        if row is None:
            raise SettingsError(f"the table has no server {name}; it has {', '.join(rows) or 'none'}")
        if is_lost:
            now = self._now()
            self._write({**rows, name: replace(row, until=now, lost=now)})
            return
        if row.until is None:
            raise SettingsError(f"{name} gets new streams: run `headrace streams drain {name}` first")
        if not row.is_lost:
            self._servers.of(name)  # checks its id
        left = 0 if row.is_lost else count_streams(self._servers, name)
        if left:
            raise SettingsError(f"{name} has {left} streams: wait until they have expired")
        if placed := sum(_count_placed(server, name) for server in self._tables):
            raise SettingsError(f"{placed} queued messages have their streams on {name}: wait until they have ended")
        for table in self._tables:
            table.hdel(STREAM_SERVERS_KEY, name)

    def states(self) -> Iterator[StreamServerState]:
        """Describe the servers of the table and of `HEADRACE_STREAM_URLS`."""
        table = self._servers.refresh()
        for name, row in table.rows.items():
            state = "lost" if row.is_lost else "open" if row.until is None else "draining"
            until = None if row.until is None else row.until / 1000
            yield StreamServerState(name, state, row.since / 1000, until, None if row.is_lost else self._problem(name))
        for name in self._servers.names:
            if name not in table.rows:
                yield StreamServerState(name, "unused", None, None, self._problem(name))

    def _problem(self, name: str) -> str | None:
        try:
            self._servers.of(name)
            nodes = self._servers.nodes(name)
            return next(filter(None, (eviction_warning(node.info()) for node in nodes.values())), None)
        except (SettingsError, *REDIS_ERRORS) as error:
            return str(error)

    def _require_url(self, name: str) -> None:
        if name not in self._servers.names:
            raise SettingsError(self._servers.missing_url(name))

    def _row(self, name: str, since: int, server_id: str) -> StreamServerRow:
        return StreamServerRow(since, None, server_id, self._servers.is_cluster(name))

    def _now(self) -> int:
        seconds, microseconds = self._servers.main.time()
        return int(seconds) * 1000 + int(microseconds) // 1000

    def _has_no_id(self, name: str) -> bool:
        return not self._servers.client(name).exists(STREAM_SERVER_ID_KEY)

    def _identified(self, name: str, expected: str | None) -> str:
        """Return the id of a server. A server without one gets `expected`, or a new one."""
        client = self._servers.client(name)
        client.set(STREAM_SERVER_ID_KEY, expected or secrets.token_hex(_ID_BYTES), nx=True)
        found: Any = client.get(STREAM_SERVER_ID_KEY)
        server_id: str = found.decode(errors="replace")
        if expected is not None and server_id != expected:
            raise SettingsError(f"the URL of {name} leads to the server {server_id!r}, and the table has {expected!r}")
        others = {row.server_id: other for other, row in self._servers.table.rows.items() if other != name}
        if server_id in others:
            raise SettingsError(f"the URLs of {name} and {others[server_id]} lead to one server")
        return server_id

    def _write(self, rows: dict[str, StreamServerRow]) -> None:
        packed: Any = {name: row.pack() for name, row in rows.items()}
        for table in self._tables:
            table.hset(STREAM_SERVERS_KEY, mapping=packed)


def count_streams(servers: StreamServers, name: str) -> int:
    """Count the streams of a server by a scan of its keys."""
    count = 0
    for home in servers.homes_of(name):
        client, pattern = servers.client(home), stream_key(id_in_keys(home, "*"))
        client.exists(pattern)  # a node that lost the slot would redirect this, but not the scan
        count += sum(1 for _ in client.scan_iter(match=pattern, count=_SCANNED_AT_ONCE))
    return count


def _count_placed(client: "redis.Redis", name: str) -> int:
    """Count the messages in the queues of a server whose streams were placed on the stream server `name`."""
    count = 0
    for key in client.scan_iter(match=lease_records_key("*"), count=_SCANNED_AT_ONCE):
        for _, packed in client.hscan_iter(key, count=_SCANNED_AT_ONCE):
            with suppress(Exception):  # written by hand; msgpack's errors have no common base
                count += unpack(packed).get("at") == name
    return count


def shown_time(seconds: float | None) -> str:
    """Format unix seconds in UTC."""
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
