"""The servers of the simulated protocol: real ones, whose leases expire in virtual time.

Redis's clock cannot be set. So a lease lasts `_REDIS_SECONDS` of it for each virtual second, and none expires while a
schedule runs. When the lease has expired in virtual time, `QueueServer` sets its expiry to the past, before the reaper
runs its script.
"""

from collections.abc import Iterable
from typing import Final

import msgpack
import redis

from fleet.virtual_time import Actor, VirtualTime
from headrace_broker.keys import (
    STREAM_SERVERS_KEY,
    lease_bodies_key,
    lease_meta_key,
    lease_records_key,
    leases_key,
    stream_key,
)
from headrace_broker.queue.leases import Leases
from headrace_broker.server.stream_table import StreamTable
from headrace_broker.streams.events import StreamEvent, read_entry
from headrace_broker.streams.grant import Grant
from service.broker.tenant_messages import LISTS, QUEUE, envelope

LEASE_SECONDS: Final = 15.0
REQUEST: Final = "r"
_REDIS_SECONDS: Final = 1000
_REAP_SECONDS: Final = 1.0
_DELIVERY_LIMIT: Final = 10**6
"""No dead letters: a request must be answered, however often workers crash."""
_LONG_AGO: Final = 1


class QueueServer:
    """The server with the queue and the leases. It has one message."""

    def __init__(self, client: "redis.Redis", time: VirtualTime) -> None:
        client.flushall()
        client.lpush(LISTS[0], envelope(REQUEST, id=REQUEST))
        self.client, self._time = client, time
        self.away_until = 0.0
        self.is_done = False
        """Whether the message was acknowledged."""
        self._expires_at = 0.0
        """Virtual time."""
        self._score: float | None = None

    def make_leases(self) -> Leases:
        """Make the leases of a worker process, with an owner of their own."""
        return Leases(
            self.client,
            lease_seconds=LEASE_SECONDS * _REDIS_SECONDS,
            delivery_limit=_DELIVERY_LIMIT,
            clock=lambda: self._time.now * _REDIS_SECONDS,
        )

    def read_table(self) -> StreamTable:
        """Read the table of stream servers."""
        return StreamTable.read(self.client.hgetall(STREAM_SERVERS_KEY))

    def clock(self) -> float:
        """Return Redis's time in unix seconds."""
        seconds, microseconds = self.client.time()
        return float(seconds + microseconds / 1e6)

    def postpone(self, leases: Leases, lease_id: str, seconds: float) -> None:
        leases.postpone(lease_id, seconds * _REDIS_SECONDS, keeps_place=True)

    def ran(self) -> None:
        """Note when the lease that Redis has now expires in virtual time."""
        found = self.client.zrange(leases_key(QUEUE), 0, -1, withscores=True)
        score = found[0][1] if found else None
        if score is not None and score != self._score:
            self._expires_at = self._time.now + round((score - self.clock()) / _REDIS_SECONDS, 2)
        self._score = score
        if score is None and not self.client.exists(lease_bodies_key(QUEUE), *LISTS):
            self.is_done = True

    def has_lease(self, leases: Leases, lease_id: str, grant: Grant | None) -> bool:
        """Return whether this grant is the message's lease now."""
        meta = self.client.hget(lease_meta_key(QUEUE), lease_id)
        packed = self.client.hget(lease_records_key(QUEUE), lease_id)
        if meta is None or packed is None or grant is None:
            return False
        is_owner: bool = meta.startswith(f"{leases.owner}|".encode())
        return is_owner and msgpack.unpackb(packed).get("grant") == grant.number

    def reap(self) -> Actor:
        """Return the message to the queue when its lease has expired, as the queue's reaper does."""
        reaper = self.make_leases()
        was_away = False
        while not self.is_done:
            yield _REAP_SECONDS
            if self._time.now < self.away_until:
                was_away = True
                continue
            if was_away:
                reaper.pause_reaping()  # the holder needs time to renew
                was_away = False
            if self._score is not None and self._time.now >= self._expires_at:
                for lease_id in self.client.zrange(leases_key(QUEUE), 0, -1):
                    self.client.zadd(leases_key(QUEUE), {lease_id: _LONG_AGO}, xx=True)
                reaper.reap(QUEUE)
                self.ran()


class StreamServer:
    """A server on which the request's stream may be."""

    def __init__(self, client: "redis.Redis") -> None:
        client.flushall()
        self.client = client
        self.away_until = 0.0

    def ran(self) -> None:
        """Do nothing: streams do not expire in a schedule."""


class Subscriber:
    """Reads the stream, as any reader does: at all servers, until one has an entry."""

    def __init__(self, servers: Iterable[StreamServer], time: VirtualTime) -> None:
        self._servers, self._time = list(servers), time
        self.read: list[StreamEvent] = []
        self._last_id = "0-0"

    def read_new(self) -> None:
        """Read the entries after the last one that was read."""
        for server in self._servers:
            if self._time.now < server.away_until:
                continue
            for _, entries in server.client.xread({stream_key(REQUEST): self._last_id}):
                self._servers = [server]
                self.read += [read_entry(entry_id, fields) for entry_id, fields in entries]
                self._last_id = entries[-1][0].decode()
                return
