"""`Publisher`: the chunks of a step into Redis, in one call, and again until Redis has them."""

import logging
import time
from collections.abc import Iterable

from headrace_broker.connections import REDIS_ERRORS
from headrace_broker.streams import Attempt, StreamWrite, StreamWriter, WriteOutcome
from headrace_monitoring.metrics import Metrics

logger = logging.getLogger(__name__)


class Publisher:
    """Holds what is not written yet.

    While Redis is away the writes of later steps queue up behind; sending an entry twice is harmless, because its ID
    says what it is. Memory is bounded by the tokens of the requests in flight.
    """

    def __init__(self, writer: StreamWriter, metrics: Metrics) -> None:
        self._writer = writer
        self._metrics = metrics
        self._pending: list[StreamWrite] = []
        self._refused = False

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, writes: Iterable[StreamWrite]) -> None:
        self._pending += writes

    def drop(self, attempt: Attempt) -> None:
        """Forget what is not written yet of an attempt that is no longer ours."""
        self._pending = [write for write in self._pending if write.key != attempt]

    def flush(self, *, retry: bool = False) -> dict[Attempt, WriteOutcome] | None:
        """Write everything. Returns the attempts of which the stream refused an entry; None when Redis did not take it.

        After a failure only a `retry` tries again: not every step, as what waits grows with each.
        """
        if self._refused and not retry:
            return None
        if not self._pending:
            return {}
        started = time.perf_counter()
        try:
            refused = self._writer.publish(self._pending)
        except REDIS_ERRORS as error:
            self._metrics.redis_error("publish")
            self._metrics.redis_up(False)
            self._refused = True
            logger.warning("%d stream entries wait for Redis: %s", len(self._pending), error)
            return None
        self._refused = False
        self._metrics.redis_command("publish", time.perf_counter() - started)
        self._metrics.redis_up(True)
        self._metrics.stream_entries(len(self._pending))
        self._pending.clear()
        return refused
