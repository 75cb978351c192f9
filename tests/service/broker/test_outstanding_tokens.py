"""The tokens that a queue's messages will cost, against a real server."""

from collections.abc import Callable

import pytest
import redis

from headrace_broker.keys import costs_key, mean_cost_key, sorted_ids_key, waiting_key
from headrace_broker.queue.leases import Leases
from headrace_broker.queue.outstanding_tokens import read_outstanding_tokens
from service.broker.tenant_messages import LISTS, QUEUE, numbered, push, take, tenant_of


def serve(client: "redis.Redis", leases: Leases, costs: dict[str, int]) -> None:
    """Run one request of each tenant at this cost."""
    for tenant in costs:
        push(client, tenant, [f"of {tenant}"])
    for message in take(leases, len(costs)):
        leases.cost(message.lease_id, costs[tenant_of(message)])
        leases.ack(message.lease_id)


def test_an_empty_queue_has_no_tokens(redis_client: "redis.Redis") -> None:
    assert read_outstanding_tokens(redis_client, QUEUE) == {"waiting": 0, "leased": 0}


def test_nothing_is_guessed_before_a_request_has_ended(redis_client: "redis.Redis") -> None:
    push(redis_client, "a", ["a"])
    assert read_outstanding_tokens(redis_client, QUEUE) is None


def test_messages_that_no_worker_has_sorted_cost_the_queues_average(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    serve(redis_client, make_leases(), {"a": 40})
    push(redis_client, "a", numbered("a", 3))
    push(redis_client, "b", numbered("b", 2), step=2)
    assert read_outstanding_tokens(redis_client, QUEUE) == {"waiting": 200, "leased": 0}


def test_sorted_messages_cost_their_tenants_average_and_leased_ones_the_queues(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    leases = make_leases()
    serve(redis_client, leases, {"small": 10})
    serve(redis_client, leases, {"large": 1010})
    mean = float(redis_client.get(mean_cost_key(QUEUE)) or 0)
    assert mean == 210
    for tenant, count in (("small", 5), ("large", 2), ("new", 3)):
        push(redis_client, tenant, numbered(tenant, count))
    assert tenant_of(take(leases)[0]) == "new"  # which has received nothing
    found = read_outstanding_tokens(redis_client, QUEUE)
    assert found == {"waiting": 5 * 10 + 2 * 1010 + 2 * mean, "leased": mean}


def test_messages_wait_if_they_are_due_or_their_lease_has_expired(redis_client: "redis.Redis") -> None:
    leases = Leases(redis_client, lease_seconds=0, delivery_limit=9)
    serve(redis_client, leases, {"a": 100})
    push(redis_client, "a", numbered("a", 3))
    due, later, _expired = take(leases, 3)
    leases.postpone(due.lease_id, 0)
    leases.postpone(later.lease_id, 3000)
    assert read_outstanding_tokens(redis_client, QUEUE) == {"waiting": 200, "leased": 0}


def test_a_key_of_the_wrong_type_counts_as_empty(
    make_leases: Callable[..., Leases], redis_client: "redis.Redis"
) -> None:
    serve(redis_client, make_leases(), {"a": 40})
    push(redis_client, "a", numbered("a", 3))
    for key in (costs_key(QUEUE), waiting_key(QUEUE), sorted_ids_key(LISTS[0])):
        redis_client.delete(key)
        redis_client.set(key, "x")
    assert read_outstanding_tokens(redis_client, QUEUE) == {"waiting": 120, "leased": 0}
    redis_client.delete(mean_cost_key(QUEUE))
    redis_client.set(mean_cost_key(QUEUE), "x")
    assert read_outstanding_tokens(redis_client, QUEUE) is None


@pytest.mark.parametrize("damaged", ["nan", "inf", "-5", "0", "x", ""])
def test_an_average_that_was_edited_by_hand_is_no_average(redis_client: "redis.Redis", damaged: str) -> None:
    redis_client.set(mean_cost_key(QUEUE), damaged)
    push(redis_client, "a", ["a"])
    assert read_outstanding_tokens(redis_client, QUEUE) is None


def test_of_ten_thousand_tenants_those_with_the_most_messages_count_with_their_own_averages(
    redis_client: "redis.Redis",
) -> None:
    redis_client.set(mean_cost_key(QUEUE), "100")
    tenants = [f"tenant-{number:05}" for number in range(10_000)]
    redis_client.zadd(costs_key(QUEUE), dict.fromkeys(tenants[8_500:9_500], 10.0))
    redis_client.zadd(waiting_key(QUEUE), dict.fromkeys(tenants[:9_000], 1) | dict.fromkeys(tenants[9_000:], 2))
    redis_client.zadd(sorted_ids_key(LISTS[0]), {str(number): number for number in range(11_000)})
    assert read_outstanding_tokens(redis_client, QUEUE) == {"waiting": 1_000 * 10 + 10_000 * 100, "leased": 0}
