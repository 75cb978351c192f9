"""The order in which waiting requests are admitted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_engine.core.request_queue import RequestQueue, create_request_queue
from headrace_engine.options.config import SchedulingPolicy
from headrace_engine.requests.request import Request
from unit.engine.requests import request


def drain(queue: RequestQueue) -> list[str]:
    found = []
    while queue:
        head = queue.peek()
        assert queue.pop() is head
        found.append(head.request_id)
    return found


def test_first_come_first_served_ignores_priority() -> None:
    queue = create_request_queue("fcfs")
    for name, priority in (("a", 5), ("b", 0), ("c", 9)):
        queue.add(request(name, priority=priority))
    assert drain(queue) == ["a", "b", "c"]


def test_a_preempted_request_returns_to_the_head() -> None:
    queue = create_request_queue("fcfs")
    queue.add(request("late"))
    queue.add_first(request("preempted"))
    assert drain(queue) == ["preempted", "late"]


def test_priority_goes_before_arrival_and_arrival_before_name() -> None:
    queue = create_request_queue("priority")
    for name, priority, arrival in (("z", 1, 1.0), ("y", 0, 3.0), ("x", 0, 2.0), ("a", 1, 1.0)):
        queue.add(request(name, priority=priority, arrival_time=arrival))
    assert drain(queue) == ["x", "y", "a", "z"]


def test_a_preempted_request_keeps_its_place_by_priority() -> None:
    queue = create_request_queue("priority")
    queue.add(request("urgent", priority=0, arrival_time=9.0))
    queue.add(request("later", priority=3, arrival_time=5.0))
    queue.add_first(request("preempted", priority=3, arrival_time=1.0))
    assert drain(queue) == ["urgent", "preempted", "later"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_queue_can_be_looked_through_in_order_without_being_changed(policy: SchedulingPolicy) -> None:
    queue = create_request_queue(policy)
    for arrival, name in enumerate("cab"):
        queue.add(request(name, arrival_time=float(arrival)))
    assert [r.request_id for r in queue] == ["c", "a", "b"]
    assert len(queue) == 3


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@given(priorities=st.lists(st.integers(0, 3), min_size=1, max_size=12), data=st.data())
def test_removal_leaves_the_order_of_the_rest(
    policy: SchedulingPolicy, priorities: list[int], data: st.DataObject
) -> None:
    queue = create_request_queue(policy)
    requests: list[Request] = []
    for index, priority in enumerate(priorities):
        requests.append(request(f"{index:02}", priority=priority, arrival_time=float(index)))
        queue.add(requests[-1])
    gone = data.draw(st.sets(st.sampled_from(requests)))
    for one in gone:
        queue.remove(one)
    left = [one for one in requests if one not in gone]
    if policy == "priority":
        left.sort(key=lambda one: (one.priority, one.arrival_time))
    assert drain(queue) == [one.request_id for one in left]
