"""`MessageSender`: sends checked requests as Celery tasks. A `Client` imports it, and Celery, for its first request."""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final

from kombu import Queue

from headrace_broker.app import make_app
from headrace_broker.client.submission import Submission
from headrace_broker.client.tracing import ClientTracing
from headrace_broker.keys import queue_name
from headrace_broker.settings import BrokerSettings


class MessageSender:
    """Sends messages to the servers of their queues. Threads may share it. The errors of kombu pass through."""

    def __init__(self, settings: BrokerSettings, tracing: ClientTracing) -> None:
        self._main_url: Final = settings.redis_url
        self._urls: Final = settings.url_by_queue
        self._tracing: Final = tracing
        urls = {self._main_url, *self._urls.values()}
        self._apps: Final = {url: make_app(replace(settings, redis_url=url, queue_urls="")) for url in urls}
        """Celery's applications by the URL of the server to which they send."""

    def close(self) -> None:
        """Close all connections."""
        for app in self._apps.values():
            app.close()

    def send(self, submissions: Sequence[Submission], *, batch_size: int = 0) -> None:
        """Send the messages in batches of `batch_size`; 0 sends them one by one."""
        by_url: dict[str, list[Submission]] = defaultdict(list)
        for submission in submissions:
            by_url[self._urls.get(queue_name(submission.model), self._main_url)].append(submission)
        for url, submissions_there in by_url.items():
            with (
                self._apps[url].producer_pool.acquire(block=True) as producer,
                producer.batch(max_size=batch_size) if batch_size else nullcontext(),
            ):
                for submission in submissions_there:
                    self._send(producer, submission)

    def _send(self, producer: Any, submission: Submission) -> None:
        # Celery's own send_task would also subscribe this process to every result, until the process ends.
        amqp = self._apps[self._main_url].amqp
        message = amqp.create_task_message(
            submission.request_id,
            submission.request.task_name,
            args=(),
            kwargs=submission.request.to_kwargs(),
            expires=submission.expires,
            argsrepr="",  # the readable copies would put prompts into logs, events and monitors
            kwargsrepr="",
        )
        with self._tracing.sending(submission) as context:
            amqp.send_task_message(
                producer,
                submission.request.task_name,
                message,
                queue=Queue(queue_name(submission.model)),
                declare=[],  # a Redis list needs no declaration
                priority=submission.priority,
                headers={**submission.headers, **context},
            )
