"""`ShopWorker`: a plain Celery worker without any Headrace code. Its tasks run before and after those of Headrace.

Each run is recorded in Redis: the hash `shop:runs` counts the runs of each task id, and the list `shop:calls` has the
name, the id and the arguments of each run.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import redis
from celery import Celery

from service.workers.worker_process import WorkerProcess


class ShopWorker(WorkerProcess):
    """The worker in its own process."""

    def __init__(self, redis_url: str, log: Path, queues: str = "celery,shop") -> None:
        super().__init__(
            model="none",
            redis_url=redis_url,
            log=log,
            command=[sys.executable, "-m", "service.workers.shop_app"],
            environ={"SHOP_QUEUES": queues, "PYTHONPATH": str(Path(__file__).parents[2])},
        )

    def wait_ready(self, timeout: float = 150.0) -> "ShopWorker":
        self.wait_for_log(r" ready\.", timeout)
        return self


def make_app(url: str) -> Celery:
    """Make the application of the worker, and of producers that send its tasks."""
    app = Celery("shop", broker=url, backend=url, set_as_current=False)
    app.conf.update(
        task_acks_late=True,
        worker_prefetch_multiplier=1,
        broker_connection_retry_on_startup=True,
        worker_cancel_long_running_tasks_on_connection_loss=False,
    )
    client = redis.Redis.from_url(url)

    def record(task: Any, *args: Any) -> None:
        with client.pipeline() as pipe:
            pipe.hincrby("shop:runs", task.request.id, 1)
            pipe.rpush("shop:calls", json.dumps([task.name, task.request.id, args]))
            pipe.execute()

    @app.task(name="shop.fetch", bind=True, shared=False)
    def fetch(self: Any, prompt: Any) -> Any:
        record(self, prompt)
        return prompt

    @app.task(name="shop.store", bind=True, shared=False)
    def store(self: Any, result: dict[str, Any], note: str = "") -> str:
        record(self, result["request_id"], note)
        return str(result["request_id"])

    @app.task(name="shop.gather", bind=True, shared=False)
    def gather(self: Any, results: list[Any]) -> int:
        record(self, [result["request_id"] if isinstance(result, dict) else result for result in results])
        return len(results)

    @app.task(name="shop.failed", bind=True, shared=False)
    def failed(self: Any, *args: Any) -> None:
        record(self, *(arg if isinstance(arg, str) else repr(arg) for arg in args))

    return app


def close_app(app: Celery) -> None:
    """Close a producer's application. Its results unsubscribe when they are collected, which needs the server."""
    for pending in app.backend._pending_results:
        pending.clear()
    gc.collect()
    app.close()


def main() -> None:
    options = ["--pool", "threads", "--concurrency", "4", "--without-gossip", "--without-mingle", "--loglevel", "INFO"]
    make_app(os.environ["HEADRACE_REDIS_URL"]).worker_main(["worker", "--queues", os.environ["SHOP_QUEUES"], *options])


if __name__ == "__main__":
    main()
