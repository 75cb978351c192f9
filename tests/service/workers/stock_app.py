"""The application of `StockWorker`: plain Celery without any Headrace code, with the safest settings that it has.

It serves the queue and the task name of the tests' model. A request sleeps for as many seconds as its `prompt` says.
Each receipt is counted in Redis before that.
"""

import os
import time

import redis
from celery import Celery


def main() -> None:
    url = os.environ["HEADRACE_REDIS_URL"]
    app = Celery("stock", broker=url, backend=url)
    app.conf.update(
        task_serializer="msgpack",
        result_serializer="msgpack",
        accept_content=["msgpack"],
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=1,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        broker_connection_retry_on_startup=True,
        # unacknowledged messages are looked for every second, instead of every hundred
        broker_transport_options={
            "visibility_timeout": 1,
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 1,
        },
    )

    @app.task(name="headrace.generate", bind=True)
    def generate(self: object, prompt: str) -> None:
        redis.Redis.from_url(url).hincrby("receipts", self.request.id, 1)  # type: ignore[attr-defined]
        time.sleep(float(prompt))

    options = ["--pool", "threads", "--concurrency", "8", "--without-gossip", "--without-mingle"]
    app.worker_main(["worker", "--queues", "headrace.tiny", "--loglevel", "INFO", *options])


if __name__ == "__main__":
    main()
