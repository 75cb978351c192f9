"""Isolation finds the request that kills engines, so that other requests do not fail here or on another worker."""

from __future__ import annotations

import pytest

from headrace_engine.requests.request import FinishReason
from headrace_workers.requests.isolation import TOKENS_TO_CLEAR
from unit.workers.desk import Desk
from unit.workers.fakes import AWAY, CAPABILITIES, MODEL, FakeCeleryRequest


@pytest.fixture
def desk() -> Desk:
    return Desk()


def lose_engine(desk: Desk) -> list[str]:
    """Let the engine die and the next one get ready. Returns the requests sent to it."""
    desk.watch.on_engine_lost("killed", "crash", was_ready=True)
    desk.engine.sent.clear()
    desk.watch.on_engine_ready(MODEL, CAPABILITIES)
    return sent(desk)


def sent(desk: Desk) -> list[str]:
    return ["".join(map(chr, request.prompt_token_ids)) for request in desk.engine.sent]


def ask(desk: Desk, name: str, n: int = 1) -> FakeCeleryRequest:
    """Send a request whose prompt shows its name in `sent`."""
    kwargs = {"prompt_token_ids": [ord(name)], "sampling_params": {"max_tokens": 30, "n": n}}
    return desk.accept(FakeCeleryRequest(name, kwargs, lease_id=name))


def test_a_request_that_had_no_slot_of_the_engine_is_no_suspect(desk: Desk) -> None:
    ask(desk, "a", n=3)
    waits = ask(desk, "b", n=3)
    assert sent(desk) == ["a"] * 3
    for _ in range(2):
        lose_engine(desk)
    job = desk.in_flight.get(waits.id)
    assert job is not None
    assert job.engine_losses == 0


def test_a_request_that_kills_a_third_engine_alone_is_a_dead_letter_and_the_others_continue(desk: Desk) -> None:
    requests = [ask(desk, name) for name in "abc"]
    assert lose_engine(desk) == ["a", "b", "c"]
    assert lose_engine(desk) == ["a"]
    assert desk.admission.free_slots() == 0
    assert lose_engine(desk) == ["b"]  # so it was a
    assert desk.engine.num_death_resets == 1
    desk.settle()
    assert desk.results["a"]["error"]["code"] == "dead_letter"
    assert desk.redis.end("a")["error"]["code"] == "dead_letter"
    assert requests[0].dead_letter_reason == "poison: killed"
    for _ in range(TOKENS_TO_CLEAR - 1):
        desk.generate(13)
    assert sent(desk) == ["b"]
    desk.generate(13)
    assert requests[1].fate == ["accepted", "requeued"]
    assert sent(desk) == ["b", "c"]
    del desk.engine.sent[0]
    for _ in range(TOKENS_TO_CLEAR):
        desk.generate(13)
    assert requests[2].fate == ["accepted", "requeued"]
    assert [request.dead_letter_reason for request in requests[1:]] == [None, None]
    desk.assert_idle()


def test_a_poison_request_with_held_back_tokens_is_found_as_soon() -> None:
    """Eight choices give eight tokens in one step, which would clear a request that resumed before the fatal token."""
    desk = Desk(max_num_seqs=9, publish_interval=60)
    kwargs = {"prompt": "abc", "sampling_params": {"max_tokens": 30, "n": 8}}
    desk.accept(FakeCeleryRequest("a", kwargs, lease_id="a"))
    for _ in range(3):
        desk.generate(*[13] * 8)
    for _ in range(2):
        assert set(lose_engine(desk)) == {"abc".translate(str.maketrans("abc", "\n\x0b\x0c"))}
        assert [len(request.output_token_ids) for request in desk.engine.sent] == [3] * 8
    assert lose_engine(desk) == []
    desk.settle()
    assert desk.results["a"]["error"]["code"] == "dead_letter"


def test_a_suspect_that_ends_frees_the_engine_for_the_next(desk: Desk) -> None:
    ask(desk, "a")
    ask(desk, "b")
    lose_engine(desk)
    assert lose_engine(desk) == ["a"]
    desk.admission.terminate("a")
    desk.dispatcher.heartbeat()
    assert sent(desk) == ["a", "b"]
    del desk.engine.sent[0]
    desk.generate(13, finish=FinishReason.LENGTH)
    desk.assert_idle()


def test_a_request_that_arrives_while_a_suspect_runs_alone_waits_outside_the_engine(desk: Desk) -> None:
    ask(desk, "a")
    lose_engine(desk)
    lose_engine(desk)
    ask(desk, "b")
    assert sent(desk) == ["a"]
    assert lose_engine(desk) == ["b"]
    assert desk.admission.free_slots() == 3
    desk.generate(13, finish=FinishReason.LENGTH)
    desk.assert_idle()
    assert desk.results["b"]["error"] is None


def test_one_engine_death_makes_no_suspect(desk: Desk) -> None:
    ask(desk, "a")
    assert lose_engine(desk) == ["a"]
    ask(desk, "b")
    assert desk.admission.free_slots() == 2
    assert lose_engine(desk) == ["a"]  # b was there once


def another_worker(desk: Desk) -> Desk:
    """Make a worker that shares Redis with the first."""
    other = Desk()
    other.redis.streams, other.redis.values = desk.redis.streams, desk.redis.values
    return other


def test_a_loss_on_one_worker_counts_on_the_next(desk: Desk) -> None:
    ask(desk, "a")
    lose_engine(desk)
    other = another_worker(desk)
    for name in "ba":
        ask(other, name)
    assert sent(other) == ["b", "a"]
    assert lose_engine(other) == ["a"]  # b was in one engine only
    assert lose_engine(other) == ["b"]
    other.settle()
    assert other.results["a"]["error"]["code"] == "dead_letter"
    assert "b" not in other.results


def test_a_suspect_from_another_worker_waits_for_an_empty_engine(desk: Desk) -> None:
    ask(desk, "a")
    lose_engine(desk)
    lose_engine(desk)
    other = another_worker(desk)
    ask(other, "b")
    ask(other, "a")
    assert sent(other) == ["b"]
    assert other.admission.free_slots() == 0
    other.generate(13)
    assert sent(other) == ["b"]
    other.generate(13, finish=FinishReason.LENGTH)
    assert sent(other) == ["b", "a"]
    ask(other, "c")
    assert sent(other) == ["b", "a"]
    assert lose_engine(other) == ["c"]
    other.settle()
    assert other.results["a"]["error"]["code"] == "dead_letter"
    assert other.results["b"]["error"] is None


def test_a_suspect_that_ends_while_it_waits_blocks_no_request(desk: Desk) -> None:
    ask(desk, "a")
    lose_engine(desk)
    lose_engine(desk)
    other = another_worker(desk)
    ask(other, "b")
    ask(other, "a")
    other.admission.terminate("a")
    other.dispatcher.heartbeat()
    assert other.admission.free_slots() == 3


def test_a_cleared_request_is_cleared_on_every_worker(desk: Desk) -> None:
    ask(desk, "a")
    lose_engine(desk)
    lose_engine(desk)
    for _ in range(TOKENS_TO_CLEAR):
        desk.generate(13)
    other = another_worker(desk)
    ask(other, "b")
    ask(other, "a")
    assert sent(other) == ["b", "a"]


def test_a_loss_that_redis_did_not_record_is_recorded_at_the_next_heartbeat(desk: Desk) -> None:
    ask(desk, "a")
    desk.redis.error = AWAY
    lose_engine(desk)
    assert desk.redis.values == {}
    desk.redis.error = None
    desk.dispatcher.heartbeat()
    assert desk.redis.values == {"headrace:losses:a": 1}
