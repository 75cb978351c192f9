"""Celery's events are sent in batches. The consumer is made without a connection."""

from typing import Any

from celery import Celery
from celery.events import EventDispatcher

from headrace_workers.celery.consumer import EngineConsumer


class Producer:
    def __init__(self) -> None:
        self.published: list[Any] = []

    def publish(self, body: Any, **_: object) -> None:
        self.published.append(body)


def test_events_are_sent_together_at_the_next_flush() -> None:
    producer = Producer()
    consumer: Any = EngineConsumer.__new__(EngineConsumer)
    consumer.hub = None  # which is not to be asked for a turn
    dispatcher: Any = EventDispatcher(
        app=Celery(broker="memory://", set_as_current=False),
        enabled=False,  # that would connect
        buffer_group=["task"],
        on_send_buffered=consumer.on_send_event_buffered,
    )
    dispatcher.enabled, dispatcher.producer = True, producer
    consumer.event_dispatcher = dispatcher
    for kind in ("task-received", "task-started", "task-succeeded"):
        dispatcher.send(kind, uuid="r")
    assert producer.published == []
    consumer.flush_events()
    assert [[event["type"] for event in batch] for batch in producer.published] == [
        ["task-received", "task-started", "task-succeeded"]
    ]
    consumer.flush_events()
    assert len(producer.published) == 1
