"""The usage ledger counts 1,000 requests once each, whatever their workers, connections and server do."""

import json
import random
from collections.abc import Callable
from typing import Any

import redis

from headrace_broker.queue.leased_message import LeasedMessage
from headrace_broker.queue.leases import Leases
from headrace_broker.results import Usage
from headrace_broker.server.connections import connect
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.usage.entry import UsageEntry
from headrace_broker.usage.ledger import DAY, UsageCounts, read_usage
from service.broker.tenant_messages import LISTS, QUEUE, envelope, take
from service.broker.test_usage_ledger import expire_leases
from service.servers import make_server

NUM_REQUESTS = 1000
RESTARTS = 4


class Worker:
    """A worker whose connection fails now and then, before or after Redis has run a script."""

    def __init__(self, client: "redis.Redis", draw: random.Random) -> None:
        self.leases = Leases(client, lease_seconds=60, delivery_limit=10**6, usage_days=1)
        self._draw = draw
        self._ack = self.leases._run["ack"]
        self.leases._run["ack"] = self._unreliable

    def _unreliable(self, *args: Any, **keys: Any) -> Any:
        fate = self._draw.random()
        if fate < 0.1:
            raise redis.ConnectionError("not sent")
        reply = self._ack(*args, **keys)
        if fate > 0.9:
            raise redis.ConnectionError("the reply is lost")
        return reply

    def end(self, message: LeasedMessage) -> None:
        number = int(json.loads(message.body)["body"])
        self.leases.cost(message.lease_id, number, UsageEntry("completions", f"k{number % 3}", usage_of(number)))
        self.leases.ack(message.lease_id)


def usage_of(number: int) -> Usage:
    return Usage(10 + number, number % 7, 1 + number % 100)


def run(server: EmbeddedServer, draw: random.Random, is_over: Callable[["redis.Redis"], bool]) -> None:
    """Let workers end messages until all are done, or until the server is to be killed."""
    with connect(server.url) as client:
        worker = Worker(client, draw)
        while not is_over(client):
            for message in take(worker.leases, 16):
                fate = draw.random()
                if fate < 0.1:
                    worker.leases.requeue(message.lease_id, is_counted=True)
                elif fate < 0.9:
                    worker.end(message)  # else it is held until the worker dies
            if draw.random() < 0.5:
                worker.leases.tick()
            if draw.random() < 0.3:  # kill -9
                worker = Worker(client, draw)
                expire_leases(client)
                Leases(client, lease_seconds=60, delivery_limit=10**6).reap(QUEUE)


def counts(client: "redis.Redis") -> UsageCounts:
    now, sums = client.time()[0], UsageCounts()
    for each in read_usage([client], DAY, now - DAY, now + DAY).values():
        sums = sums.plus(each)
    return sums


def test_a_thousand_requests_under_faults_are_counted_once_each() -> None:
    draw = random.Random(7)
    with make_server(appendonly=True) as server:
        with connect(server.url) as client:
            for number in range(NUM_REQUESTS):
                client.lpush(LISTS[0], envelope(str(number), f"t{number % 5}", id=f"r{number}"))
        for restart in range(1, RESTARTS + 1):
            enough = restart * NUM_REQUESTS // (RESTARTS + 1)
            run(server, draw, lambda client, enough=enough: counts(client).requests >= enough)
            server.kill()
            server.start()
        run(server, draw, lambda client: counts(client).requests >= NUM_REQUESTS)
        with connect(server.url) as client:
            expire_leases(client)
            assert Leases(client, lease_seconds=60, delivery_limit=5).reap(QUEUE) == 0, "a request is left"
            found, told = counts(client), [usage_of(number) for number in range(NUM_REQUESTS)]
    assert found.requests == NUM_REQUESTS
    assert found.prompt_tokens == sum(each.prompt_tokens for each in told)
    assert found.cached_tokens == sum(each.cached_tokens for each in told)
    assert found.completion_tokens == sum(each.completion_tokens for each in told)
    assert found.attempts > NUM_REQUESTS + 100
