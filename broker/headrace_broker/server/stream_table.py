"""The rule that chooses the stream server of a request, its home, and the table of the stream servers. Does no I/O.

The script that sorts a message applies the same rule (`lua/home_prelude.lua`) and records the home. Only readers
compute homes here: those under the tables that were valid since the request can have been sent. The main server, that
of `HEADRACE_REDIS_URL`, has the name ''.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import msgpack

from headrace_broker.packing import unpack
from headrace_wire.values import is_number

MAIN: Final = ""
"""The name of the main server, where all streams are that have no other home."""
MAX_SERVERS: Final = 16
"""The most servers of a table: the script that sorts a message computes a hash for each."""
LOOK_BACK_SECONDS: Final = 86_400
"""Readers look at the homes under the tables of the last day, and of the life of a stream before it."""
_NAME: Final = re.compile(r"[a-z0-9-]{1,32}")
_WEIGHT_DIGITS: Final = 13
"""Hex digits of the hash that are compared: Lua's numbers are exact up to 2^53."""


def stream_server_problems(what: str, name: str) -> list[str]:
    """Return why a text cannot be the name of a stream server; nothing if it can."""
    if _NAME.fullmatch(name):
        return []
    return [f"{what} must be 1 to 32 of the characters a-z 0-9 -, got {name!r}"]


def home_of(names: Iterable[str], request_id: str) -> str:
    """Return the home of a request among these servers: the name with the highest hash; `MAIN` if there are none.

    Rendezvous hashing (Thaler, Ravishankar 1998): a new server takes its share from all others, and no request moves
    between those.
    """
    return max(names, key=lambda name: (_weight(name, request_id), name), default=MAIN)


def _weight(name: str, request_id: str) -> int:
    text = f"{name}\n{request_id}".encode(errors="surrogatepass")
    return int(hashlib.sha1(text, usedforsecurity=False).hexdigest()[:_WEIGHT_DIGITS], 16)


@dataclass(frozen=True, slots=True)
class StreamServerRow:
    """One server of the table. Times are unix milliseconds by Redis's clock."""

    since: int
    """When the server began to get new streams."""
    until: int | None
    """When it ceased to get new streams; None while it gets them."""
    server_id: str
    """The random id that is also on the server itself."""
    is_cluster: bool = False
    """Whether the server is a Redis Cluster, whose keys have shards."""
    lost: int | None = None
    """When an operator declared that the streams on it are lost; None if they are not."""

    def is_open(self, at: float) -> bool:
        """Return whether new streams are placed on the server at this time."""
        return self.since <= at and (self.until is None or at < self.until)

    @property
    def is_lost(self) -> bool:
        """Whether nothing is on the server, and nothing is placed there."""
        return self.lost is not None and self.until is not None and self.until <= self.lost

    def pack(self) -> bytes:
        row: dict[str, Any] = {"since": self.since, "until": self.until, "id": self.server_id}
        row |= {"cluster": True} if self.is_cluster else {}
        row |= {"lost": self.lost} if self.lost is not None else {}
        packed: bytes = msgpack.packb(row)
        return packed

    @classmethod
    def read(cls, packed: bytes) -> Self | None:
        """Decode a field of the table; None if it cannot be read."""
        try:
            row: Any = unpack(packed)
            since, until, server_id, lost = row["since"], row.get("until"), row["id"], row.get("lost")
        except Exception:  # noqa: BLE001  # written by hand; msgpack's errors have no common base
            return None
        if not (is_number(since) and (until is None or is_number(until)) and isinstance(server_id, str)):
            return None
        is_cluster, lost = row.get("cluster") is True, int(lost) if is_number(lost) else None
        return cls(int(since), None if until is None else int(until), server_id, is_cluster, lost)


@dataclass(frozen=True, slots=True)
class StreamTable:
    """The rows of `headrace:stream-servers` by name."""

    rows: Mapping[str, StreamServerRow]
    unreadable: tuple[str, ...] = ()
    """The fields that are ignored, because their name or their value cannot be read."""

    @classmethod
    def read(cls, fields: Mapping[bytes, bytes]) -> Self:
        """Decode the reply of HGETALL."""
        rows: dict[str, StreamServerRow] = {}
        unreadable = []
        for name, packed in sorted(fields.items()):
            text = name.decode(errors="replace")
            row = StreamServerRow.read(packed)
            if row is None or stream_server_problems("", text):
                unreadable.append(text)
            else:
                rows[text] = row
        return cls(rows, tuple(unreadable))

    def open_servers(self, at: float) -> list[str]:
        """Return the servers on which new streams are placed at this time, in unix milliseconds."""
        return [name for name, row in self.rows.items() if row.is_open(at) and not row.is_lost]

    def homes(self, request_id: str, since: float) -> list[str]:
        """Return the homes of a request under each table since this time, in unix milliseconds; the newest first.

        All times of the table count, also those that are ahead of this process's clock: Redis's clock wrote them.
        """
        times = {since} | {
            time for row in self.rows.values() for time in (row.since, row.until) if time is not None and time > since
        }
        homes = [home_of(self.open_servers(at), request_id) for at in sorted(times, reverse=True)]
        return list(dict.fromkeys(homes))


EMPTY_TABLE: Final = StreamTable({})
