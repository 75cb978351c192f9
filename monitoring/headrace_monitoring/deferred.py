"""`DeferredObservations`: what happens at every step of an engine, told to Prometheus when somebody looks.

The worker wakes up for a step with caches that the model's weights have swept meanwhile, so that each object that it
touches comes from memory. An observation touches a handful, and a step has fifty observations. Many steps at once are
told at a fraction of the cost.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headrace_monitoring.logging import frames

logger = logging.getLogger(__name__)


class DeferredObservations(Collector):
    """Register it before all families: a registry collects in that order, so a scrape misses nothing.

    Any thread may add and settle.
    """

    def __init__(self) -> None:
        self._waiting: Final[deque[tuple[Callable[..., None], tuple[Any, ...]]]] = deque()
        self._settling: Final = threading.Lock()
        """Levels must be set in the order in which they were reached."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, observe: Callable[..., None], *args: Any) -> None:
        """To be called later; what the arguments hold must not change any more."""
        self._waiting.append((observe, args))

    def settle(self) -> None:
        """Call everything that was added before. One that fails is logged, so that a scrape goes on."""
        with self._settling:
            while self._waiting:
                observe, args = self._waiting.popleft()
                try:
                    observe(*args)
                except Exception as error:  # noqa: BLE001  # whatever it is, it must not hold up an engine's restart
                    logger.error("an observation failed: %s", frames(error))

    def describe(self) -> Iterable[Metric]:
        """It has no family of its own."""
        return ()

    def collect(self) -> Iterable[Metric]:
        self.settle()
        return ()
