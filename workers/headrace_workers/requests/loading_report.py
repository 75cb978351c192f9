"""`LoadingReport`: tells clients that this worker is loading its model, and how far it is."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import redis
import structlog

from headrace_broker.models.loading_models import forget_loading, report_loading
from headrace_broker.server.connections import REDIS_ERRORS

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)


class LoadingReport:
    """The worker's row among the loading models. Without Redis there is none, and the model loads all the same.

    Args:
        names: served names of the model.
        now: unix seconds.
    """

    def __init__(
        self, client: "redis.Redis", worker: str, names: Sequence[str], now: Callable[[], float] = time.time
    ) -> None:
        self._client = client
        self._worker = worker
        self._names = names
        self._now = now
        self._since = now()
        self.progress = 0.0
        """Share of the weights that is loaded, 0 to 1. The next `send` writes it."""
        self._is_sent = False
        self._is_refused = False

    def begin(self) -> None:
        """Start again from nothing, because the engine process was lost."""
        self._since, self.progress = self._now(), 0.0

    def send(self) -> None:
        """Write the row. Call it again within `LOADING_SECONDS`."""
        self._is_sent = True
        try:
            report_loading(
                self._client, self._worker, self._names, progress=self.progress, since=self._since, now=self._now()
            )
        except redis.exceptions.NoPermissionError as error:
            self._on_refused(error)
        except REDIS_ERRORS:
            pass  # the next report may be written

    def _on_refused(self, error: redis.exceptions.NoPermissionError) -> None:
        """Log it once: the rights stay as they are, and reports are written every 2 s."""
        if not self._is_refused:
            self._is_refused = True
            logger.warning("loading report refused", error=str(error))

    def end(self) -> None:
        """Delete the row, if there is one."""
        if self._is_sent:
            self._is_sent = False
            with suppress(*REDIS_ERRORS):  # it expires by itself
                forget_loading(self._client, self._worker)
