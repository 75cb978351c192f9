"""`Publisher`: writes the chunks of a step to Redis in one call, and retries until Redis has them."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator

from headrace_broker.connections import REDIS_ERRORS
from headrace_broker.streams import Attempt, StreamWrite, StreamWriter, WriteOutcome, pack_writes, unpack_writes
from headrace_monitoring.metrics import Metrics

logger = logging.getLogger(__name__)

REPLAY_SECONDS = 10.0
"""How long written entries are kept for a replay. A replica lags behind its master by much less, and a server that
writes its append-only file every second loses at most two seconds."""


class Publisher:
    """Holds entries that are not written yet, and those of the last `REPLAY_SECONDS`.

    While Redis is away, the entries of later steps queue up. Writing an entry twice is harmless, because Redis refuses
    its ID the second time. Memory is bounded by the tokens of the requests in flight.

    A server may lose accepted entries: when a replica takes over from its master, or a machine crashes between two
    writes to its disk. Then the latest entries are written again, so that the stream has no gap.
    """

    def __init__(self, writer: StreamWriter, metrics: Metrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._writer = writer
        self._metrics = metrics
        self._clock = clock
        self._pending: list[StreamWrite] = []
        self._written: deque[tuple[float, bytes]] = deque()
        """Packed, because the garbage collector would have to walk a hundred thousand objects."""
        self._dropped: dict[Attempt, float] = {}
        """Time of each drop. A server that also lost the claim may reuse the number of a dropped attempt."""
        self.is_refused = False
        """Whether the last write to Redis failed."""
        self._failed_at: float | None = None

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, *writes: StreamWrite) -> None:
        self._pending += writes

    def drop(self, attempt: Attempt) -> None:
        """Forget the entries of an attempt that this worker no longer runs, and never write them again."""
        self._pending = [write for write in self._pending if write.key != attempt]
        self._dropped.pop(attempt, None)  # keeps the dict in the order of time
        self._dropped[attempt] = self._clock()

    def flush(self, *, retry: bool = False) -> dict[Attempt, WriteOutcome] | None:
        """Write all pending entries. Returns the attempts whose stream refused an entry, or None if the write failed.

        After a failure only a call with `retry` tries again. A try at every step would send ever more entries.
        """
        if self.is_refused and not retry:
            return None
        if not self._pending:
            return {}
        started = time.perf_counter()
        packed = pack_writes(self._pending)
        try:
            refused = self._write(packed)
        except REDIS_ERRORS as error:
            self._metrics.redis_error("publish")
            self._metrics.redis_up(False)
            self.is_refused = True
            self._failed_at = self._clock()
            logger.warning("%d stream entries wait for Redis: %s", len(self._pending), error)
            return None
        self.is_refused = False
        self._metrics.redis_command("publish", time.perf_counter() - started)
        self._metrics.redis_up(True)
        self._metrics.stream_entries(len(self._pending))
        self._keep(packed)
        return refused

    def _write(self, packed: bytes) -> dict[Attempt, WriteOutcome]:
        refused = self._writer.publish(self._pending, packed)
        behind = {key for key, outcome in refused.items() if outcome is WriteOutcome.ROLLED_BACK}
        if behind:
            logger.warning("Redis lost the latest entries of %d stream(s), writing them again", len(behind))
            again = [write for write in self._kept({request_id for request_id, _ in behind}) if write.key in behind]
            again += [write for write in self._pending if write.key in behind]
            refused = {key: outcome for key, outcome in refused.items() if key not in behind}
            refused |= self._writer.publish(again)
        if self._failed_at is not None and self._clock() - self._failed_at < REPLAY_SECONDS:
            # a stream lost with its server was not deleted by a client
            vanished = {key for key, outcome in refused.items() if outcome is WriteOutcome.GONE}
            refused |= dict.fromkeys(vanished, WriteOutcome.ROLLED_BACK)
        return refused

    def _kept(self, request_ids: Collection[str]) -> Iterator[StreamWrite]:
        for at, packed in self._written:
            for write in unpack_writes(packed, request_ids):
                if at > self._dropped.get(write.key, -math.inf):
                    yield write

    def _keep(self, packed: bytes) -> None:
        now = self._clock()
        self._written.append((now, packed))
        self._pending = []
        while self._written and now - self._written[0][0] > REPLAY_SECONDS:
            self._written.popleft()
        while self._dropped and now - next(iter(self._dropped.values())) > REPLAY_SECONDS:
            del self._dropped[next(iter(self._dropped))]
