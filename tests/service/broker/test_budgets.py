"""Budgets of API keys: reservations, and what replaces them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from headrace_broker.keys import reserved_key, reserved_tokens_key, spent_key
from headrace_broker.queue.leases import Leases
from headrace_broker.queue.purge import purge_queue
from headrace_broker.results import Usage
from headrace_broker.server.connections import connect
from headrace_broker.server.queue_servers import QueueServers
from headrace_broker.usage.budgets import BudgetDecision, Budgets
from headrace_broker.usage.entry import UsageEntry
from headrace_broker.usage.ledger import DAY
from headrace_wire.codes import DeadLetterReason
from service.broker.tenant_messages import LISTS, QUEUE, envelope, take
from service.servers import make_server

SECONDS = 600.0


@pytest.fixture
def budgets(redis_client: "redis.Redis") -> Budgets:
    return Budgets(QueueServers(redis_client, {}))


def reserve(budgets: Budgets, request_id: str, tokens: int, budget: int = 100, queue: str = QUEUE) -> BudgetDecision:
    return budgets.reserve("web", queue, {request_id: tokens}, budget=budget, seconds=SECONDS)


def send(client: "redis.Redis", request_id: str) -> None:
    client.lpush(LISTS[0], envelope(request_id, "acme", id=request_id, key_name="web"))


def entry(prompt: int, output: int, key_name: str = "web") -> UsageEntry:
    return UsageEntry("completions", key_name, Usage(prompt, 0, output))


def make_leases(client: "redis.Redis", usage_days: int = 400) -> Leases:
    return Leases(client, lease_seconds=60, delivery_limit=5, usage_days=usage_days)


def end(client: "redis.Redis", leases: Leases, prompt: int, output: int) -> None:
    (message,) = take(leases)
    leases.cost(message.lease_id, prompt + output, entry(prompt, output))
    leases.ack(message.lease_id)


def test_a_key_is_admitted_while_something_is_left(budgets: Budgets) -> None:
    assert reserve(budgets, "a", 60).is_admitted
    assert reserve(budgets, "b", 60).is_admitted
    refused = reserve(budgets, "c", 1)
    assert (refused.is_admitted, refused.used, refused.reserved, refused.made) == (False, 0, 120, frozenset())
    assert 0 < refused.seconds_left <= DAY


@pytest.mark.parametrize("usage_days", [0, 400])
def test_the_end_of_a_request_replaces_its_reservation_by_the_tokens_used(
    budgets: Budgets, redis_client: "redis.Redis", usage_days: int
) -> None:
    reserve(budgets, "a", 150)
    send(redis_client, "a")
    assert not reserve(budgets, "b", 1).is_admitted
    end(redis_client, make_leases(redis_client, usage_days), 10, 5)
    found = reserve(budgets, "b", 1)
    assert (found.is_admitted, found.used, found.reserved) == (True, 15, 0)


def test_a_request_that_used_the_rest_of_the_budget_is_the_last_one(
    budgets: Budgets, redis_client: "redis.Redis"
) -> None:
    leases = make_leases(redis_client)
    for request_id, used in (("a", 99), ("b", 40)):
        assert reserve(budgets, request_id, 50).is_admitted
        send(redis_client, request_id)
        end(redis_client, leases, used, 0)
    refused = reserve(budgets, "c", 1)
    assert (refused.is_admitted, refused.used) == (False, 139)  # 39 too many, of the 50 that were reserved
    assert reserve(budgets, "c", 1, budget=140).is_admitted


def test_a_second_reservation_of_a_request_changes_nothing(budgets: Budgets) -> None:
    assert reserve(budgets, "a", 100).made == {"a"}
    again = reserve(budgets, "a", 100)
    assert (again.is_admitted, again.reserved, again.made) == (True, 100, frozenset())
    both = budgets.reserve("web", QUEUE, {"a": 100, "b": 5}, budget=200, seconds=SECONDS)
    assert both.made == {"b"}


def test_all_requests_of_a_call_are_reserved_or_none(budgets: Budgets, redis_client: "redis.Redis") -> None:
    reserve(budgets, "a", 100)
    assert not budgets.reserve("web", QUEUE, {"b": 1, "c": 1}, budget=100, seconds=SECONDS).is_admitted
    assert redis_client.zrange(reserved_key("web"), 0, -1) == [b"a"]


def test_requests_that_were_not_sent_give_their_reservations_back(
    budgets: Budgets, redis_client: "redis.Redis"
) -> None:
    reserve(budgets, "a", 100)
    budgets.release("web", QUEUE, ["a", "unknown"])
    assert not redis_client.exists(reserved_key("web"), reserved_tokens_key("web"))


def test_a_reservation_expires_with_its_request(budgets: Budgets, redis_client: "redis.Redis") -> None:
    reserve(budgets, "a", 60)
    reserve(budgets, "b", 30)
    redis_client.zadd(reserved_key("web"), {"a": 1})
    assert reserve(budgets, "c", 1).reserved == 30
    assert 0 < redis_client.ttl(reserved_key("web")) <= SECONDS + 120
    assert 0 < redis_client.ttl(reserved_tokens_key("web")) <= SECONDS + 120


def test_a_dead_letter_and_a_purge_end_reservations(budgets: Budgets, redis_client: "redis.Redis") -> None:
    for request_id in ("dead", "purged"):
        reserve(budgets, request_id, 10)
        send(redis_client, request_id)
    leases = make_leases(redis_client)
    (message,) = take(leases)
    leases.cost(message.lease_id, 3, entry(2, 1))
    leases.dead_letter(message.lease_id, DeadLetterReason.POISON)
    assert purge_queue(redis_client, QUEUE, ttl_seconds=60).waiting == 1
    found = reserve(budgets, "next", 1)
    assert (found.used, found.reserved) == (3, 0)


def test_requests_that_reserved_nothing_use_no_budget(budgets: Budgets, redis_client: "redis.Redis") -> None:
    leases = make_leases(redis_client)
    for request_id, key_name in (("a", "other"), ("b", ""), ("d", "web")):
        send(redis_client, request_id)
        (message,) = take(leases)
        leases.cost(message.lease_id, 9, entry(9, 0, key_name))
        leases.ack(message.lease_id)
    assert reserve(budgets, "c", 1).used == 0
    assert not redis_client.exists(spent_key(redis_client.time()[0] // DAY * DAY))


def test_concurrent_requests_exceed_a_budget_by_one_reservation_at_most(budgets: Budgets) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda number: reserve(budgets, f"r{number}", 30), range(64)))
    assert sum(each.is_admitted for each in found) == 4  # 0, 30, 60 and 90 are less than 100


@pytest.fixture
def second(redis_client: "redis.Redis") -> Iterator["redis.Redis"]:
    with make_server() as server, connect(server.url) as client:
        yield client


def test_a_budget_counts_what_is_used_and_reserved_on_all_servers(
    redis_client: "redis.Redis", second: "redis.Redis"
) -> None:
    url = f"redis://127.0.0.1:{second.connection_pool.connection_kwargs['port']}/0"
    with QueueServers(redis_client, {"headrace.other": url}) as servers:
        budgets = Budgets(servers)
        assert reserve(budgets, "a", 60).is_admitted
        assert reserve(budgets, "b", 60, queue="headrace.other").is_admitted
        for queue in (QUEUE, "headrace.other"):
            refused = reserve(budgets, "c", 1, queue=queue)
            assert (refused.is_admitted, refused.reserved) == (False, 120)
        assert second.zrange(reserved_key("web"), 0, -1) == [b"b"]


def test_a_server_that_is_away_does_not_stop_the_queues_of_others(redis_client: "redis.Redis") -> None:
    with make_server() as away:
        url = away.url
    with QueueServers(redis_client, {"headrace.other": url}, retries=0) as servers:
        budgets = Budgets(servers)
        assert reserve(budgets, "a", 100).is_admitted
        assert not reserve(budgets, "b", 1).is_admitted
        with pytest.raises(redis.ConnectionError):
            reserve(budgets, "c", 1, queue="headrace.other")


@pytest.mark.parametrize("key", ["reserved", "tokens", "spent"])
def test_a_key_of_the_wrong_type_is_reported_and_prevents_no_acknowledgement(
    budgets: Budgets, redis_client: "redis.Redis", key: str
) -> None:
    today = redis_client.time()[0] // DAY * DAY
    keys = {"reserved": [reserved_key("web")], "tokens": [reserved_tokens_key("web")]}
    for name in keys.get(key, [spent_key(today), spent_key(today + DAY)]):
        redis_client.set(name, "by hand")
    with pytest.raises(redis.ResponseError, match="restore or delete it"):
        reserve(budgets, "a", 1)
    send(redis_client, "a")
    end(redis_client, make_leases(redis_client), 1, 1)
    assert not redis_client.exists("headrace:lease:leases:" + QUEUE)
