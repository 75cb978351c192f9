"""The load of `headrace demo --watch`, on a real server without a worker."""

import json

import pytest
import redis

from headrace_broker.client.client import Client
from headrace_broker.keys import queue_lists, queue_name
from headrace_broker.models.registry import register_model
from headrace_broker.server.embedded import EmbeddedServer
from headrace_cli.demo.steady_load import TENANTS, SteadyLoad


@pytest.fixture
def reported() -> list[str]:
    return []


@pytest.fixture
def pauses() -> list[float]:
    return []


@pytest.fixture
def load(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", reported: list[str], pauses: list[float]
) -> SteadyLoad:
    register_model(redis_client, "tiny", max_model_len=100, worker="w", seen=1.0)
    return SteadyLoad(redis_server.url, "tiny", ["why?"], reported.append, sleep=pauses.append)


def test_requests_of_several_tenants_and_priorities_are_sent_with_a_deadline(
    load: SteadyLoad, redis_client: "redis.Redis", pauses: list[float], reported: list[str]
) -> None:
    load.run(stopped=lambda: len(pauses) == 12)
    found = [json.loads(raw) for key in queue_lists(queue_name("tiny")) for raw in redis_client.lrange(key, 0, -1)]
    assert len(found) >= 12
    assert {message["headers"]["tenant"] for message in found} == set(TENANTS)
    assert {message["properties"]["priority"] for message in found} == {0, 3, 6, 9}
    assert all(message["headers"]["expires"] for message in found)
    assert all(0 < seconds < 10 for seconds in pauses)
    assert reported == []


def test_an_unavailable_redis_is_reported_and_does_not_end_the_load(
    load: SteadyLoad, redis_server: EmbeddedServer, pauses: list[float], reported: list[str]
) -> None:
    redis_server.kill()
    try:
        load.run(stopped=lambda: len(pauses) == 2)
    finally:
        redis_server.start()
    assert len(reported) == 2


def test_one_batch_of_requests_can_be_sent_without_a_loop(load: SteadyLoad, redis_server: EmbeddedServer) -> None:
    with Client(redis_server.url, model="tiny") as client:
        assert 1 <= len(load.send(client)) <= 4
