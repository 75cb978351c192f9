"""The simulated fleet meets more due times by its order than by fixed priorities, and chats stay first."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from fleet_model.arrivals import Request
from fleet_model.due_times import (
    ALONE,
    CHAT,
    DUE,
    FIFO,
    FIXED,
    LONG,
    NONE,
    ORDERS,
    SHORT,
    ByDueTime,
    Work,
    expected_times,
    simulate,
    simulated_work,
)

WORK = Work(slots=4, slot_seconds=10.0, seconds=100.0, short=60.0, long=200.0, day=100.0, burst=1, chats=0.0)
KINDS = [LONG, NONE, SHORT, CHAT, NONE, SHORT]


def order_at(now: float, sent: list[float]) -> list[str]:
    """Take messages of `KINDS`, which were sent at these times, one after the other at one time."""
    messages = ByDueTime(lambda: now, WORK, KINDS)
    for number, at in enumerate(sent):
        messages.append(Request(number, at, 1, 1))
    return [f"{KINDS[request.number]} {request.number}" for request in (messages.popleft() for _ in sent)]


def test_messages_are_taken_by_the_rules_of_the_script() -> None:
    assert expected_times() == 2
    sent = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    calm = ["chat 3", "short window 2", "no due time 1", "short window 5", "no due time 4", "long window 0"]
    assert order_at(6.0, sent) == calm
    urgent = ["chat 3", "short window 2", "short window 5", "long window 0", "no due time 1", "no due time 4"]
    assert order_at(46.0, sent) == urgent  # 60 s after they were sent, less 20 s
    late = ["chat 3", "long window 0", "short window 2", "short window 5", "no due time 1", "no due time 4"]
    assert order_at(185.0, sent) == late


def test_of_many_that_are_due_together_the_first_start_early() -> None:
    kinds = [NONE, *[SHORT] * 40]
    messages = ByDueTime(lambda: 1.0, WORK, kinds)  # each takes 10 s, four at once: 100 s
    for number in range(41):
        messages.append(Request(number, 0.0, 1, 1))
    assert kinds[messages.popleft().number] == SHORT


@pytest.mark.parametrize("order", ORDERS)
def test_every_request_is_served_once_in_every_order(order: str) -> None:
    work, plan = simulated_work(1, 8, seconds=60.0)
    once, again = (simulate(order, work, plan, 5) for _ in range(2))  # it asserts that each is served once
    assert once == again
    assert (once["short_met"] is None) == (order == ALONE)


def test_arrivals_have_the_load_that_is_asked_for() -> None:
    work, _ = simulated_work(4, 16, seconds=1440.0)
    arrivals = work.arrivals(Random(1))
    assert len(arrivals) / work.seconds == pytest.approx(work.rate, rel=0.1)
    assert sum(kind == CHAT for _, kind in arrivals) / len(arrivals) == pytest.approx(work.chats, abs=0.05)


def test_due_times_are_met_more_often_than_by_arrival_or_fixed_priorities_and_chats_are_as_fast() -> None:
    work, plan = simulated_work(1, 16, seconds=1440.0)
    fifo, fixed, due = (simulate(order, replace(work, load=0.9), plan, 1) for order in (FIFO, FIXED, DUE))
    for other in (fifo, fixed):
        assert due["short_met"] >= other["short_met"]
        assert due["long_met"] >= other["long_met"]
    assert due["short_met"] + due["long_met"] > fixed["short_met"] + fixed["long_met"]
    assert due["chat_ttft_ms_p95"] <= 1.1 * fixed["chat_ttft_ms_p95"] < 0.1 * fifo["chat_ttft_ms_p95"]
    assert due["none_latency_s_p50"] < fixed["none_latency_s_p50"]
