"""`StockWorker`: a plain Celery worker on kombu's own Redis transport, only for comparison.

What it runs is in `stock_app.py`.
"""

import sys
from pathlib import Path

import redis

from service.workers.worker_process import WorkerProcess

_APP = Path(__file__).with_name("stock_app.py")
VISIBILITY_TIMEOUT = 1.0
"""Seconds; as in `stock_app.py`."""


class StockWorker(WorkerProcess):
    """A stock worker in its own process, with the safest settings that Celery has."""

    def __init__(self, redis_url: str, log: Path) -> None:
        super().__init__(model="none", redis_url=redis_url, log=log, command=[sys.executable, str(_APP)])

    def wait_ready(self, timeout: float = 150.0) -> "StockWorker":
        self.wait_for_log(r" ready\.", timeout)
        return self


def receipts(client: "redis.Redis", request_id: str) -> int:
    """Count how often workers have started this request."""
    return int(client.hget("receipts", request_id) or 0)
