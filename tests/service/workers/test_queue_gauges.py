"""How often a worker reads the levels of its queues."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from headrace_broker.queue.leases import Leases
from headrace_broker.queue.worker_leases import WorkerLeases
from headrace_monitoring.health import WorkerHealth
from headrace_monitoring.metrics import Metrics
from headrace_workers.celery.queue_gauges import POLL_SECONDS, QueueGauges

if TYPE_CHECKING:
    import redis

QUEUE = "headrace.tiny"


class Site:
    """The gauges of one worker under a clock of their own."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.now = 0.0
        self.health = WorkerHealth()
        self.health.state("ready")
        self.leases = Leases(client, lease_seconds=15, delivery_limit=5)
        self.leases.serve(QUEUE)
        metrics = Metrics(model="tiny", queue=QUEUE, version="1")
        self.gauges = QueueGauges(lambda _: client, [QUEUE], metrics, self.health, lambda: self.now)
        self.gauges.attach(WorkerLeases(self.leases, {}))

    def reads(self, polls: int) -> list[bool]:
        """Poll so often, and return which polls have asked Redis anything."""
        found = []
        for _ in range(polls):
            self.client.config_resetstat()
            self.gauges.poll()
            found.append("cmdstat_eval_ro" in self.client.info("commandstats"))
            self.now += POLL_SECONDS
        return found


@pytest.fixture
def site(redis_client: redis.Redis) -> Site:
    return Site(redis_client)


def test_an_idle_worker_reads_empty_queues_by_every_third_poll(site: Site) -> None:
    assert site.reads(7) == [True, False, False, True, False, False, True]


def test_a_queue_with_messages_is_read_by_each_poll(site: Site) -> None:
    site.client.lpush(QUEUE, "{}")
    assert site.reads(3) == [True, True, True]
    site.client.delete(QUEUE)
    assert site.reads(3) == [True, False, False]


def test_a_worker_that_holds_a_message_reads_its_queues_by_each_poll(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert site.reads(2) == [True, False]
    monkeypatch.setattr(WorkerLeases, "__len__", lambda _: 1)
    assert site.reads(2) == [True, True]


def test_after_a_reconnect_the_queues_are_read_again(site: Site) -> None:
    assert site.reads(2) == [True, False]
    site.gauges.attach(WorkerLeases(site.leases, {}))
    assert site.reads(2) == [True, False]


def test_a_refusal_is_over_at_the_second_poll_of_an_idle_worker(site: Site) -> None:
    assert site.reads(2) == [True, False]
    site.gauges.refused("no right")
    assert site.reads(1) == [True]
    assert "no right" in str(site.health.not_ready())
    assert site.reads(2) == [True, False]
    assert site.health.not_ready() is None
