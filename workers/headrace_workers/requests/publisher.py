"""`Publisher` writes the chunks of a step to one stream server, `Publishers` to all of them."""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import redis
import structlog

from headrace_broker.server.connections import REDIS_ERRORS
from headrace_broker.server.stream_table import MAIN
from headrace_broker.streams.writer import (
    Attempt,
    StreamWrite,
    StreamWriter,
    WriteOutcome,
    pack_writes,
    unpack_writes,
)
from headrace_monitoring.metrics import Metrics
from headrace_workers.requests.stream_homes import StreamHomes

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)

REPLAY_SECONDS = 10.0
"""Seconds for which written entries are kept for a replay. A replica lags behind its master by much less, and a server
that writes its append-only file every second loses at most two seconds."""


_SHORTEST_STEP = 0.05
_LONGEST_STEP = 0.4
"""Limits of the time for which the replies of all stream servers are awaited: the duration of the last step."""
_GIVEN_UP_SECONDS = 10.0
"""A connection whose reply is as late as this is closed."""
MOST_PENDING_BYTES = 256 * 1024 * 1024
"""Limit of the entries that wait for one stream server. Beyond it, its requests return to the queue."""
_MOST_SENT_BYTES = 4 * 1024 * 1024
"""Limit of one call to a stream server: it must be sent within `STREAM_TIMEOUT`, and blocks the server."""
_ENTRY_BYTES = 200
"""Estimate of the memory of an entry, besides its data."""


class Publisher:
    """Writes the chunks of a step to one server in one call, and retries until it has them.

    It holds entries that are not written yet, and those of the last `REPLAY_SECONDS`.

    While the server is unavailable, the entries of later steps queue up. Writing an entry twice is harmless, because
    Redis refuses its ID the second time. Memory is bounded by the tokens of the requests in flight.

    A server may lose accepted entries: when a replica takes over from its master, or a machine crashes between two
    writes to its disk. Then the latest entries are written again, so that the stream has no gap.
    """

    def __init__(
        self,
        writer: StreamWriter,
        metrics: Metrics,
        *,
        most_bytes: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._writer = writer
        self._metrics = metrics
        self._most_bytes = most_bytes
        """Of one call, about."""
        self._clock = clock
        self._pending: list[StreamWrite] = []
        self._sent: list[StreamWrite] = []
        """Entries of a call whose reply was not read yet; none if there is no such call."""
        self._sent_packed = b""
        self._sent_at = 0.0
        self._dropped_since: set[Attempt] = set()
        """Attempts that were dropped since the call was sent."""
        self._written: deque[tuple[float, bytes]] = deque()
        """Time and packed entries of each write: unpacked, the garbage collector would walk many thousand objects."""
        self._dropped: dict[Attempt, float] = {}
        """Time of each drop. A server that also lost the claim may reuse the number of a dropped attempt."""
        self.refusal: str | None = None
        """Why the last write to Redis failed; None if it did not."""
        self._failed_at: float | None = None

    def __len__(self) -> int:
        return len(self._sent) + len(self._pending)

    @property
    def is_refused(self) -> bool:
        """Whether the last write to Redis failed."""
        return self.refusal is not None

    @property
    def is_waiting(self) -> bool:
        """Whether the reply to a call is awaited."""
        return bool(self._sent)

    def num_bytes(self) -> int:
        """Estimate the memory of the entries that are not written. It visits them all."""
        return sum(len(write.data) + _ENTRY_BYTES for write in (*self._sent, *self._pending))

    def add(self, *writes: StreamWrite) -> None:
        self._pending += writes

    def drop(self, attempt: Attempt) -> None:
        """Forget the entries of an attempt that this worker no longer runs, and never write them again."""
        if self._pending:
            self._pending = [write for write in self._pending if write.key != attempt]
        self._dropped_since.add(attempt)
        self._dropped.pop(attempt, None)  # keeps the dict in the order of time
        self._dropped[attempt] = self._clock()

    def drop_all(self) -> None:
        """Do as `drop` for every attempt that has entries here. Takes one pass, however many entries there are."""
        now, attempts = self._clock(), self.unwritten()
        self._pending = []
        self._dropped_since |= attempts
        for attempt in attempts:
            self._dropped.pop(attempt, None)
            self._dropped[attempt] = now

    def flush(self, *, retry: bool = False) -> dict[Attempt, WriteOutcome] | None:
        """Write all pending entries. Returns the attempts whose stream refused an entry, or None if the write failed.

        After a failure only a call with `retry` tries again. A try at every step would send ever more entries.
        """
        if self.is_refused and not retry:
            return None
        return self.receive() if self.send() else None

    def send(self) -> bool:
        """Send pending entries, unless the reply to an earlier call is awaited. Return False if that failed."""
        if self._sent or not self._pending:
            return True
        count = self._number_at_once()
        self._sent, self._pending = self._pending[:count], self._pending[count:]
        self._sent_at = self._clock()
        self._dropped_since.clear()
        self._sent_packed = pack_writes(self._sent)
        try:
            self._writer.send(self._sent, self._sent_packed)
        except REDIS_ERRORS as error:
            self._fail(error)
            return False
        return True

    def _number_at_once(self) -> int:
        """Return how many entries the next call has. A server that was away for long gets them in several."""
        if self._most_bytes == math.inf:
            return len(self._pending)
        size = 0
        for count, write in enumerate(self._pending):
            if size > self._most_bytes:
                return count
            size += len(write.data) + _ENTRY_BYTES
        return len(self._pending)

    def unwritten(self) -> set[Attempt]:
        """Return the attempts with entries that are not written yet."""
        return {write.key for write in (*self._sent, *self._pending)}

    def has_reply(self, timeout: float) -> bool:
        """Wait `timeout` seconds at most, and return whether `receive` would not wait."""
        return not self._sent or self._writer.has_reply(timeout)

    def receive(self) -> dict[Attempt, WriteOutcome] | None:
        """Read the reply to the last call. Returns what `flush` returns."""
        if not self._sent:
            return {}
        try:
            refused = self._receive()
        except REDIS_ERRORS as error:
            self._fail(error)
            return None
        self.refusal = None
        self._metrics.entries_written(len(self._sent), self._clock() - self._sent_at)
        self._keep()
        return refused

    def give_up(self, error: Exception) -> None:
        """Stop to wait for a reply. The entries are sent again."""
        self._writer.disconnect()
        self._fail(error)

    @property
    def seconds_waited(self) -> float:
        return self._clock() - self._sent_at if self._sent else 0.0

    def _fail(self, error: Exception) -> None:
        left = [write for write in self._sent if write.key not in self._dropped_since]
        self._sent, self._pending = [], [*left, *self._pending]
        self._metrics.redis_error("publish")
        self.refusal = str(error)
        self._failed_at = self._clock()
        logger.warning("stream entries not written", entries=len(self._pending), error=str(error))

    def _receive(self) -> dict[Attempt, WriteOutcome]:
        refused = self._writer.receive(self._sent, self._sent_packed)
        behind = {key for key, outcome in refused.items() if outcome is WriteOutcome.ROLLED_BACK}
        if behind:
            logger.warning("stream entries lost by Redis, written again", streams=len(behind))
            again = [write for write in self._kept({request_id for request_id, _ in behind}) if write.key in behind]
            again += [write for write in self._sent if write.key in behind - self._dropped_since]
            refused = {key: outcome for key, outcome in refused.items() if key not in behind}
            refused |= self._writer.publish(again)
        if self._failed_at is not None and self._clock() - self._failed_at < REPLAY_SECONDS:
            # Redis has just failed: the server lost these streams, no client deleted them
            vanished = {key for key, outcome in refused.items() if outcome is WriteOutcome.GONE}
            refused |= dict.fromkeys(vanished, WriteOutcome.ROLLED_BACK)
        return refused

    def _kept(self, request_ids: Collection[str]) -> Iterator[StreamWrite]:
        for at, packed in self._written:
            for write in unpack_writes(packed, request_ids):
                if at > self._dropped.get(write.key, -math.inf):
                    yield write

    def _keep(self) -> None:
        now, packed = self._clock(), self._sent_packed
        if self._dropped_since:  # while the reply was awaited
            packed = pack_writes(write for write in self._sent if write.key not in self._dropped_since)
        self._written.append((now, packed))
        self._sent, self._sent_packed = [], b""
        while self._written and now - self._written[0][0] > REPLAY_SECONDS:
            self._written.popleft()
        while self._dropped and now - next(iter(self._dropped.values())) > REPLAY_SECONDS:
            del self._dropped[next(iter(self._dropped))]


@dataclass(slots=True)
class Flushed:
    """The result of one write to all servers."""

    refused: dict[Attempt, WriteOutcome]
    """The attempts whose stream refused an entry."""
    behind: set[str]
    """The servers that do not have all entries yet."""
    unwritten: set[Attempt]
    """The attempts with entries that are not written yet."""


class Publishers:
    """One `Publisher` for each stream server. A step sends to all of them and then reads all replies.

    So a step waits for the slowest server, not for all in turn. A server that has not answered within the duration of
    a step is away: its entries wait, and its reply is looked for at each later step.
    """

    def __init__(self, homes: StreamHomes, metrics: Metrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._homes = homes
        self._metrics = metrics
        self._clock = clock
        self._by_home: dict[str, Publisher] = {MAIN: Publisher(homes.main, metrics, clock=clock)}
        self._flushed_at = clock()

    def __len__(self) -> int:
        return sum(map(len, self._by_home.values()))

    def of(self, home: str) -> Publisher:
        if home not in self._by_home:
            self._by_home[home] = Publisher(
                self._homes.writer(home), self._metrics, most_bytes=_MOST_SENT_BYTES, clock=self._clock
            )
        return self._by_home[home]

    def is_refused(self, home: str) -> bool:
        """Return whether the last write to this server failed, or its reply is late."""
        return self.of(home).is_refused or self._homes.is_away(home)

    @property
    def refusal(self) -> str | None:
        """Why the last write to the main server failed; None if it did not."""
        return self._by_home[MAIN].refusal

    def overfull(self) -> list[str]:
        """Return the stream servers for which too many entries wait."""
        return [
            home
            for home, publisher in self._by_home.items()
            if home != MAIN and publisher.num_bytes() > MOST_PENDING_BYTES
        ]

    def flush(self, *, retry: bool = False) -> Flushed:
        """Write all pending entries. After a failure of a server, only a call with `retry` tries it again."""
        step = min(max(self._clock() - self._flushed_at, _SHORTEST_STEP), _LONGEST_STEP)
        flushed = Flushed({}, set(), set())
        self._send_to_others(retry=retry)
        main = self._by_home[MAIN].flush(retry=retry)
        if main is None:
            self._metrics.redis_up(False)
        flushed.refused |= main or {}
        until = self._clock() + step
        for home, publisher in self._by_home.items():
            if home != MAIN and publisher.is_waiting:
                flushed.refused |= self._received(home, publisher, until)
        behind = {home: publisher for home, publisher in self._by_home.items() if len(publisher)}
        flushed.behind = {*behind}
        flushed.unwritten = {attempt for publisher in behind.values() for attempt in publisher.unwritten()}
        self._flushed_at = self._clock()
        return flushed

    def _send_to_others(self, *, retry: bool) -> None:
        for home, publisher in self._by_home.items():
            if home == MAIN or publisher.is_waiting or not len(publisher):
                continue
            if self._homes.is_away(home) and not (retry and self._homes.is_due(home)):
                continue
            started = self._clock()
            if not publisher.send():
                self._homes.failed(home, redis.ConnectionError(publisher.refusal), self._clock() - started)
        if retry:
            self._homes.probe(behind={home for home, publisher in self._by_home.items() if len(publisher)})

    def _received(self, home: str, publisher: Publisher, until: float) -> dict[Attempt, WriteOutcome]:
        timeout = 0.0 if self._homes.is_away(home) else max(0.0, until - self._clock())
        if not publisher.has_reply(timeout):
            late = redis.TimeoutError(f"no reply for {publisher.seconds_waited:.1f} s")
            if publisher.seconds_waited > _GIVEN_UP_SECONDS:
                publisher.give_up(late)
            self._homes.failed(home, late)
            return {}
        refused = publisher.receive()
        if refused is None:
            self._homes.failed(home, redis.ConnectionError(publisher.refusal))
            return {}
        self._homes.is_back(home)
        return refused
