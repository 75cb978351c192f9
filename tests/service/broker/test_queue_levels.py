"""The levels that a monitor reads of the queues, against a real server."""

import json
import time

import pytest
import redis
from click.testing import CliRunner

from headrace_broker.client.async_client import AsyncClient
from headrace_broker.client.client import Client
from headrace_broker.errors import QueueUnavailableError
from headrace_broker.keys import dead_letters_key, lease_meta_key, leases_key, queue_lists, queue_name
from headrace_broker.queue.fair_share import FairShare
from headrace_broker.queue.leased_message import LeasedMessage
from headrace_broker.queue.leases import Leases
from headrace_broker.queue.levels import QueueLevelReader
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.settings import BrokerSettings
from headrace_cli.commands.queue import queue as queue_command
from headrace_wire.codes import DeadLetterReason
from service.servers import make_server

QUEUE, OTHER = queue_name("one"), queue_name("two")


@pytest.fixture
def leases(redis_client: "redis.Redis") -> Leases:
    return Leases(redis_client, lease_seconds=60, delivery_limit=1)


def test_an_empty_server_shows_nothing_waiting(redis_client: "redis.Redis") -> None:
    levels = QueueLevelReader(redis_client).read([QUEUE])[QUEUE]
    assert dict(levels.ready) == {0: 0, 3: 0, 6: 0, 9: 0}
    assert (levels.leased, levels.run_out, levels.num_dead, levels.oldest_age_seconds) == (0, 0, 0, None)


def test_each_queue_and_priority_is_counted_separately(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    with Client(redis_server.url, check_model=False) as client:
        client.submit_many(
            [{"prompt": "a", "model": "one"}] * 3
            + [{"prompt": "a", "model": "one", "priority": 7}] * 2
            + [{"prompt": "a", "model": "two"}]
        )
    levels = QueueLevelReader(redis_client).read([QUEUE, OTHER])
    assert dict(levels[QUEUE].ready) == {0: 3, 3: 0, 6: 2, 9: 0}
    assert levels[OTHER].num_ready == 1


def test_a_message_that_a_worker_holds_is_leased_and_counts_for_its_own_queue(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", leases: Leases
) -> None:
    with Client(redis_server.url, check_model=False) as client:
        client.submit_many([{"prompt": "a", "model": "one"}, {"prompt": "a", "model": "two"}])
    leases.fetch(queue_lists(QUEUE), 1)
    levels = QueueLevelReader(redis_client).read([QUEUE, OTHER])
    assert (levels[QUEUE].num_ready, levels[QUEUE].leased, levels[QUEUE].run_out) == (0, 1, 0)
    assert (levels[OTHER].num_ready, levels[OTHER].leased) == (1, 0)


def test_an_expired_lease_that_no_worker_has_requeued_is_shown(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    with Client(redis_server.url, check_model=False) as client:
        client.submit("a", model="one")
    Leases(redis_client, lease_seconds=0.0, delivery_limit=5).fetch(queue_lists(QUEUE), 1)
    levels = QueueLevelReader(redis_client).read([QUEUE])[QUEUE]
    assert (levels.leased, levels.run_out) == (1, 1)


def test_delayed_messages_are_counted_and_expire_like_leases(redis_client: "redis.Redis") -> None:
    leases = Leases(redis_client, lease_seconds=60, delivery_limit=1)
    redis_client.lpush(queue_lists(QUEUE)[2], "held", "due", "later")
    for message, seconds in zip(leases.fetch(queue_lists(QUEUE), 2), (3000, 0), strict=True):
        leases.postpone(message.lease_id, seconds)
    leases.fetch(queue_lists(QUEUE), 1)
    levels = QueueLevelReader(redis_client).read([QUEUE])[QUEUE]
    assert (levels.leased, levels.delayed, levels.run_out) == (3, 2, 1)


def test_leases_ended_without_their_sets_are_counted_until_they_would_have_expired(
    redis_client: "redis.Redis",
) -> None:
    leases, lists = Leases(redis_client, lease_seconds=0, delivery_limit=9), queue_lists(QUEUE)
    redis_client.lpush(lists[2], "delayed", "held", "next")
    leases.postpone(leases.fetch(lists, 1)[0].lease_id, 0)
    leases.fetch(lists, 1)
    for key in (leases_key(QUEUE), lease_meta_key(QUEUE)):  # as a worker of an earlier version or an operator does
        redis_client.delete(key)
    reader = QueueLevelReader(redis_client)
    assert reader.read([QUEUE])[QUEUE].run_out == 2
    leases.reap(QUEUE)
    assert reader.read([QUEUE])[QUEUE].run_out == 0
    assert len(leases.fetch(lists, 1)) == 1
    levels = reader.read([QUEUE])[QUEUE]
    assert (levels.leased, levels.delayed) == (1, 0)


def test_the_cost_of_reading_does_not_grow_with_the_number_of_messages(redis_client: "redis.Redis") -> None:
    leases, lists = Leases(redis_client, lease_seconds=60, delivery_limit=1), queue_lists(QUEUE)
    reader, commands = QueueLevelReader(redis_client), []
    reader.read([QUEUE])  # counts the dead letters, once
    for count in (10, 300):
        redis_client.lpush(lists[0], *[f"{count} {number}" for number in range(count)])
        for number, message in enumerate(leases.fetch(lists, count - 5)):
            if number % 2:
                leases.postpone(message.lease_id, 0)
        redis_client.config_resetstat()
        assert reader.read([QUEUE])[QUEUE].run_out > 0
        stats = redis_client.info("commandstats")
        commands.append({name: stats[name]["calls"] for name in stats if name != "cmdstat_config|resetstat"})
    assert commands[0] == commands[1]
    assert not commands[0].keys() & {"cmdstat_hvals", "cmdstat_hgetall", "cmdstat_zrangebyscore", "cmdstat_lrange"}


def test_the_oldest_message_of_any_list_is_reported(redis_client: "redis.Redis") -> None:
    now = time.time()
    urgent, _, low, _ = queue_lists(QUEUE)
    for name, age in ((urgent, 5), (low, 100)):
        redis_client.lpush(name, json.dumps({"body": "x", "headers": {"enqueued_at": now - age}}))
    age = QueueLevelReader(redis_client).read([QUEUE])[QUEUE].oldest_age_seconds
    assert age is not None
    assert 99 < age < 130


@pytest.mark.parametrize(
    "headers", [{}, {"enqueued_at": "yesterday"}, {"tenant": '"enqueued_at": 5'}, {"enqueued_at": None}, {"x": ".."}]
)
def test_a_message_without_an_enqueue_time_has_no_age_at_first(redis_client: "redis.Redis", headers: object) -> None:
    redis_client.lpush(QUEUE, json.dumps({"headers": headers}))
    levels = QueueLevelReader(redis_client).read([QUEUE])[QUEUE]
    assert (levels.num_ready, levels.oldest_age_seconds) == (1, None)


def test_dead_letters_are_counted_by_queue_and_reason_and_again_when_they_change(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", leases: Leases
) -> None:
    reader = QueueLevelReader(redis_client)
    with Client(redis_server.url, check_model=False) as client:
        client.submit_many([{"prompt": "a", "model": "one"}] * 2 + [{"prompt": "a", "model": "two"}])
    for message in leases.fetch(queue_lists(QUEUE), 2):
        leases.hold(message.lease_id, message)
        leases.dead_letter(message.lease_id, DeadLetterReason.POISON)
    redis_client.lpush(dead_letters_key(QUEUE), *[b"not a letter"] * 250)  # more than one script reads
    levels = reader.read([QUEUE, OTHER])
    assert dict(levels[QUEUE].dead) == {"poison": 2}
    assert levels[OTHER].num_dead == 0
    assert reader.read([QUEUE])[QUEUE].num_dead == 2
    redis_client.delete(dead_letters_key(QUEUE))
    assert reader.read([QUEUE])[QUEUE].num_dead == 0


def test_reading_writes_nothing(redis_server: EmbeddedServer, redis_client: "redis.Redis") -> None:
    redis_client.execute_command("ACL", "SETUSER", "monitor", "on", "nopass", "resetkeys", "%R~*", "+@all")
    host, port = redis_server.url.removeprefix("redis://").partition("/")[0].split(":")
    try:
        with redis.Redis(host, int(port), username="monitor", password="any", protocol=2) as reader:
            reader.ping()
            assert QueueLevelReader(reader).read([QUEUE])[QUEUE].num_ready == 0
            with pytest.raises(redis.exceptions.NoPermissionError):
                reader.set("a", "b")
    finally:
        redis_client.execute_command("ACL", "DELUSER", "monitor")


def test_a_message_without_an_enqueue_time_ages_by_the_servers_clock(redis_client: "redis.Redis") -> None:
    leases, reader = Leases(redis_client, lease_seconds=60, delivery_limit=9), QueueLevelReader(redis_client)
    lists = queue_lists(QUEUE)
    redis_client.lpush(lists[2], json.dumps({"body": "x", "headers": {}}))
    assert reader.read([QUEUE])[QUEUE].oldest_age_seconds is None  # seen for the first time
    first = reader.read([QUEUE])[QUEUE]
    redis_client.lpush(lists[2], json.dumps({"body": "later", "headers": {}}))
    second = reader.read([QUEUE])[QUEUE]
    assert second.oldest_age_seconds > first.oldest_age_seconds > 0
    assert second.oldest_age_clock == "redis"
    leases.sort(lists)
    sorted_levels = [reader.read([QUEUE])[QUEUE] for _ in range(2)]
    assert sorted_levels[1].oldest_age_seconds > sorted_levels[0].oldest_age_seconds > 0
    assert (sorted_levels[1].oldest_age_clock, sorted_levels[1].num_ready) == ("redis", 2)
    leases.fetch(lists, 2)
    assert reader.read([QUEUE])[QUEUE].oldest_age_seconds is None


def test_a_producers_clock_that_is_ahead_does_not_hide_an_age(redis_client: "redis.Redis") -> None:
    leases, reader = Leases(redis_client, lease_seconds=60, delivery_limit=9), QueueLevelReader(redis_client)
    redis_client.lpush(QUEUE, json.dumps({"body": "x", "headers": {"enqueued_at": time.time() + 3600}}))
    leases.sort(queue_lists(QUEUE))
    levels = reader.read([QUEUE])[QUEUE]
    assert levels.oldest_age_clock == "redis"
    assert levels.oldest_age_seconds > 0


def test_the_waiting_time_of_a_message_survives_leases_and_postponements(redis_client: "redis.Redis") -> None:
    ageing = FairShare(ageing_seconds=1e-6)
    leases, lists = Leases(redis_client, lease_seconds=60, delivery_limit=9, fair_share=ageing), queue_lists(QUEUE)
    redis_client.lpush(lists[3], json.dumps({"body": "x", "headers": {}}))
    leases.sort(lists)
    waited = 0.0

    def take() -> LeasedMessage:
        nonlocal waited
        (message,) = leases.fetch(lists, 1)
        assert message.waited is not None
        assert 0 < waited < message.waited < 60 or waited == 0
        waited = message.waited
        return message

    leases.requeue(take().lease_id)
    leases.requeue(take().lease_id, is_counted=True)
    expired = take()
    redis_client.zadd(leases_key(QUEUE), {expired.lease_id: 1})
    leases.reap(QUEUE)
    last = take()
    began = redis_client.time()
    leases.postpone(last.lease_id, 0)
    leases.reap(QUEUE)
    (due,) = leases.fetch(lists, 1)
    ended = redis_client.time()
    assert due.waited is not None
    assert due.waited <= (ended[0] - began[0]) + (ended[1] - began[1]) / 1e6  # counted from when it was due


def test_messages_over_a_quota_stay_in_their_list_while_there_is_no_room(redis_client: "redis.Redis") -> None:
    leases = Leases(redis_client, lease_seconds=60, delivery_limit=9, fair_share=FairShare(quota=1))
    redis_client.lpush(QUEUE, "a", "b", "c")
    leases.sort(queue_lists(QUEUE))
    assert (redis_client.llen(QUEUE), redis_client.zcard(leases_key(QUEUE))) == (2, 0)
    assert [message.over_quota for message in leases.fetch(queue_lists(QUEUE), 1)] == [1, 1, 0]


async def test_clients_read_the_levels_and_the_tenants_of_models(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", leases: Leases
) -> None:
    async with AsyncClient(redis_server.url, check_model=False) as client:
        await client.submit_many([{"prompt": "a", "model": "one", "tenant": tenant} for tenant in ("x", "x", "y")])
        leases.fetch(queue_lists(QUEUE), 1)
        levels = await client.queue_levels(["one", "two"])
        assert (levels["one"].num_ready, levels["one"].leased, levels["two"].num_ready) == (2, 1, 0)
        assert await client.queue_tenants(["one", "two"]) == {"one": {"x": 1, "y": 1}, "two": {}}
        redis_client.set("headrace:queue:waiting:headrace.one", "x")
        with pytest.raises(QueueUnavailableError):
            await client.queue_tenants(["one"])


async def test_the_levels_of_other_servers_are_read_while_one_is_away(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    with make_server() as second:
        settings = BrokerSettings(redis_server.url, queue_urls=f"two={second.url}")
        redis_client.lpush(QUEUE, "message")
        second.kill()
        async with AsyncClient(settings, check_model=False) as client:
            levels = await client.queue_levels(["one", "two"])
        assert (levels["one"].num_ready, levels["one"].problem) == (1, None)
        assert levels["two"].num_ready == 0
        assert f"the queue's server 127.0.0.1:{second.port} is away" in str(levels["two"].problem)
        environ = {"HEADRACE_QUEUE_URLS": settings.queue_urls}
        command = ["list", "--model", "one", "--model", "two", "--redis-url", redis_server.url]
        shown = CliRunner().invoke(queue_command, command, env=environ)
        assert shown.exit_code == 0
        assert f"two cannot be served: the queue's server 127.0.0.1:{second.port} is away" in shown.stderr
