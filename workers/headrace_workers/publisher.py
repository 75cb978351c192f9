"""`Publisher`: the chunks of a step into Redis, in one call, and again until Redis has them."""

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
"""How long what was written is kept. A replica lags behind its master by much less, and a server that writes its file
every second loses two at most."""


class Publisher:
    """Holds what is not written yet, and what was written just now.

    While Redis is away the writes of later steps queue up behind; sending an entry twice is harmless, because its ID
    says what it is. Memory is bounded by the tokens of the requests in flight.

    A server may lose what it accepted: when a replica takes over from its master, or a machine crashes between two
    writes to its disk. Then the latest entries are written again, so that the stream has no gap.
    """

    def __init__(self, writer: StreamWriter, metrics: Metrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._writer = writer
        self._metrics = metrics
        self._clock = clock
        self._pending: list[StreamWrite] = []
        self._written: deque[tuple[float, bytes]] = deque()
        """Packed: as objects they would be a hundred thousand for the garbage collector to walk."""
        self._dropped: dict[Attempt, float] = {}
        """When. A server that lost the claim, too, gives the number of a dropped attempt out again."""
        self._refused = False
        self._failed_at: float | None = None

    @property
    def is_refused(self) -> bool:
        """Redis has not taken the last write."""
        return self._refused

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, *writes: StreamWrite) -> None:
        self._pending += writes

    def drop(self, attempt: Attempt) -> None:
        """Forget what is not written yet of an attempt that is no longer ours, and write nothing of it again."""
        self._pending = [write for write in self._pending if write.key != attempt]
        self._dropped.pop(attempt, None)  # they are in the order of their times
        self._dropped[attempt] = self._clock()

    def flush(self, *, retry: bool = False) -> dict[Attempt, WriteOutcome] | None:
        """Write everything. Returns the attempts of which the stream refused an entry; None when Redis did not take it.

        After a failure only a `retry` tries again: not every step, as what waits grows with each.
        """
        if self._refused and not retry:
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
            self._refused = True
            self._failed_at = self._clock()
            logger.warning("%d stream entries wait for Redis: %s", len(self._pending), error)
            return None
        self._refused = False
        self._metrics.redis_command("publish", time.perf_counter() - started)
        self._metrics.redis_up(True)
        self._metrics.stream_entries(len(self._pending))
        self._keep(packed)
        return refused

    def _write(self, packed: bytes) -> dict[Attempt, WriteOutcome]:
        refused = self._writer.publish(self._pending, packed)
        behind = {key for key, outcome in refused.items() if outcome is WriteOutcome.ROLLED_BACK}
        if behind:
            logger.warning("Redis lost the latest entries of %d stream(s), which are written again", len(behind))
            again = [write for write in self._kept({request_id for request_id, _ in behind}) if write.key in behind]
            again += [write for write in self._pending if write.key in behind]
            refused = {key: outcome for key, outcome in refused.items() if key not in behind}
            refused |= self._writer.publish(again)
        if self._failed_at is not None and self._clock() - self._failed_at < REPLAY_SECONDS:
            # a stream that vanished with its server was not deleted
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
