"""Which inputs a step takes: the best priority first, and requests in turns by tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace_engine.core.pooling_queue import ALLOWANCE, PoolingQueue


def drain(queue: PoolingQueue, budget: int) -> list[list[tuple[str, int]]]:
    steps = []
    while len(queue):
        steps.append(queue.take(budget))
        assert steps[-1], "a step takes something"
    return steps


def test_a_step_takes_whole_inputs_up_to_the_budget() -> None:
    queue = PoolingQueue()
    queue.add("a", [100, 100, 100, 100])
    assert queue.take(250) == [("a", 0), ("a", 1)]
    assert queue.take(250) == [("a", 2), ("a", 3)]
    assert not len(queue)


def test_an_input_that_is_larger_than_the_budget_is_a_step_of_its_own() -> None:
    queue = PoolingQueue()
    queue.add("a", [30, 5000, 30])
    assert drain(queue, 1024) == [[("a", 0)], [("a", 1)], [("a", 2)]]


def test_a_short_request_waits_for_one_turn_of_a_long_one() -> None:
    queue = PoolingQueue()
    queue.add("job", [128] * 2048)
    queue.take(1024)
    queue.add("query", [12])
    assert ("query", 0) in queue.take(1024)


def test_two_requests_share_the_tokens_whatever_the_sizes_of_their_inputs() -> None:
    queue = PoolingQueue()
    queue.add("small", [10] * 4000)
    queue.add("large", [400] * 100)
    tokens = {"small": 0, "large": 0}
    for _ in range(20):
        for name, _ in queue.take(1024):
            tokens[name] += 10 if name == "small" else 400
    assert abs(tokens["small"] - tokens["large"]) <= 2 * ALLOWANCE


def test_two_tenants_share_the_tokens_whatever_their_numbers_of_requests() -> None:
    queue = PoolingQueue()
    sizes = [[10, 60, 200][number % 3] for number in range(2048)]
    for number in range(100):
        queue.add(f"many-{number}", sizes, tenant="many")
    queue.add("one", sizes, tenant="one")
    tokens = {"many": 0, "one": 0}
    while tokens["one"] < sum(sizes):
        for name, index in queue.take(1024):
            tokens[name.partition("-")[0]] += sizes[index]
        assert abs(tokens["many"] - tokens["one"]) <= ALLOWANCE + 200


def test_short_requests_of_a_tenant_get_its_share_together() -> None:
    queue = PoolingQueue()
    queue.add("job", [128] * 2048, tenant="a")
    for number in range(1000):
        queue.add(f"query-{number}", [12], tenant="b")
    taken = [name for _ in range(10) for name, _ in queue.take(1024)]
    queries = [name for name in taken if name != "job"]
    assert queries == [f"query-{number}" for number in range(len(queries))]
    assert abs(12 * len(queries) - 128 * (len(taken) - len(queries))) <= ALLOWANCE + 128


def test_the_best_priority_is_served_first() -> None:
    queue = PoolingQueue()
    queue.add("later", [200] * 4, priority=5)
    queue.add("first", [200] * 3, priority=-1)
    assert queue.take(500) == [("first", 0), ("first", 1)]
    assert queue.take(500) == [("first", 2), ("later", 0)]


def test_a_removed_request_is_not_taken() -> None:
    queue = PoolingQueue()
    queue.add("a", [10, 10])
    queue.add("b", [10])
    queue.add("c", [10], tenant="other")
    queue.remove(["a", "c", "unknown"])
    assert drain(queue, 100) == [[("b", 0)]]
    assert not queue._shares
    assert queue.num_tokens == 0


sizes = st.lists(st.integers(1, 900), min_size=1, max_size=12)
requests = st.lists(st.tuples(sizes, st.integers(0, 2), st.sampled_from("ab")), max_size=8)


@given(requests, st.integers(1, 2000))
def test_each_input_is_taken_once_and_in_the_order_of_its_request(
    given_requests: list[tuple[list[int], int, str]], budget: int
) -> None:
    queue = PoolingQueue()
    for number, (lengths, priority, tenant) in enumerate(given_requests):
        queue.add(str(number), lengths, priority, tenant)
    assert queue.num_tokens == sum(sum(lengths) for lengths, _, _ in given_requests)
    taken: dict[str, list[int]] = {}
    for step in drain(queue, budget):
        assert len(step) == 1 or sum(given_requests[int(name)][0][index] for name, index in step) <= budget
        for name, index in step:
            taken.setdefault(name, []).append(index)
    assert taken == {str(number): [*range(len(lengths))] for number, (lengths, _, _) in enumerate(given_requests)}
    assert queue.num_tokens == 0
    assert not queue._rings
    assert not queue._shares
