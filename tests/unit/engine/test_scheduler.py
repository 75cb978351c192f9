"""The scheduler's decisions, one rule a test, against a runner that checks its side of the contract."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_engine.core.engine_core import EngineCore
from headrace_engine.core.kv_cache_manager import KVCacheManager
from headrace_engine.core.scheduler import Scheduler
from headrace_engine.errors import DuplicateRequestError, EngineFullError
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.requests.request import FinishReason
from headrace_engine.runner.contracts import RunnerCapabilities
from unit.engine.fake_runner import FakeRunner, fake_config, tokens_alone
from unit.engine.requests import Results, core_request, request


def make_core(
    caps: RunnerCapabilities | None = None, max_model_len: int = 32, **options: Any
) -> tuple[EngineCore, FakeRunner]:
    config = fake_config(**options)
    runner = FakeRunner(
        caps=caps or RunnerCapabilities(),
        max_model_len=max_model_len,
        max_tokens_per_step=config.scheduler.max_num_batched_tokens,
        max_requests=config.scheduler.max_num_seqs,
    )
    return EngineCore(config, runner), runner


def shapes(runner: FakeRunner) -> list[dict[str, int]]:
    return [batch.num_scheduled_tokens for batch in runner.batches if batch.num_scheduled_tokens]


def test_prompts_and_decodes_share_a_step() -> None:
    core, runner = make_core()
    results = Results()
    core.add_request(core_request("a", range(20, 25), ignore_eos=True))
    results.step(core)
    core.add_request(core_request("b", range(30, 36)))
    results.step(core)
    assert shapes(runner) == [{"a": 5}, {"a": 1, "b": 6}]
    assert results.kinds == ["prefill", "mixed"]


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    core, runner = make_core(max_num_batched_tokens=7)
    core.add_request(core_request("a", range(20, 36), max_tokens=2, ignore_eos=True))
    results = Results().drain(core)
    assert shapes(runner) == [{"a": 7}, {"a": 7}, {"a": 2}, {"a": 1}]
    assert len(results.tokens["a"]) == 2


def test_running_requests_have_the_budget_before_waiting_ones() -> None:
    core, runner = make_core(max_num_batched_tokens=4)
    core.add_request(core_request("a", [21], max_tokens=4, ignore_eos=True))
    results = Results()
    results.step(core)
    core.add_request(core_request("b", range(30, 40)))
    results.step(core)
    assert shapes(runner)[1] == {"a": 1, "b": 3}


def test_no_more_requests_run_than_max_num_seqs() -> None:
    core, _ = make_core(max_num_seqs=2)
    for name in "abcd":
        core.add_request(core_request(name, [ord(name) % 50], max_tokens=3))
    results = Results()
    results.step(core)
    assert [r.request_id for r in core.scheduler.running] == ["a", "b"]
    assert len(core.scheduler.waiting) == 2
    assert set(results.drain(core).finished) == set("abcd")


def test_a_runner_with_a_smaller_batch_limits_the_running_requests() -> None:
    core, runner = make_core(RunnerCapabilities(max_batch=1))
    for name in "abc":
        core.add_request(core_request(name, [ord(name) % 50], max_tokens=3))
    Results().drain(core)
    assert all(len(shape) == 1 for shape in shapes(runner))


def test_a_runner_that_cannot_mix_gets_prompts_and_decodes_in_turn() -> None:
    core, runner = make_core(RunnerCapabilities(mixed_batches=False))
    results = Results()
    core.add_request(core_request("a", range(20, 25), ignore_eos=True, max_tokens=5))
    results.step(core)
    core.add_request(core_request("b", range(30, 36), ignore_eos=True, max_tokens=5))
    for _ in range(3):
        results.step(core)
    assert shapes(runner) == [{"a": 5}, {"a": 1}, {"b": 6}, {"a": 1, "b": 1}]


def test_prefills_in_one_step_are_limited_to_what_the_runner_takes() -> None:
    core, runner = make_core(RunnerCapabilities(mixed_batches=False, max_prefills_per_step=1))
    for first in (20, 30, 40):
        core.add_request(core_request(str(first), range(first, first + 5), ignore_eos=True, max_tokens=2))
    Results().drain(core)
    assert shapes(runner) == [{"20": 5}, {"20": 1}, {"30": 5}, {"30": 1}, {"40": 5}, {"40": 1}]


def test_chunks_are_no_longer_than_the_runners_longest() -> None:
    core, runner = make_core(RunnerCapabilities(chunk_sizes=[2, 4]))
    core.add_request(core_request("a", range(20, 30), max_tokens=1))
    Results().drain(core)
    assert shapes(runner) == [{"a": 4}, {"a": 4}, {"a": 2}]


def test_lack_of_blocks_preempts_the_youngest_and_it_finishes_with_the_same_tokens() -> None:
    core, runner = make_core(num_blocks=9, prefix_caching=False)  # 8 blocks of 4 tokens for two times 20 tokens
    messages = [
        core_request(name, range(first, first + 10), ignore_eos=True, max_tokens=10)
        for name, first in (("old", 10), ("young", 40))
    ]
    for message in messages:
        core.add_request(message)
    results = Results().drain(core)
    assert results.preemptions == 1
    arrivals = [arrival.request_id for batch in runner.batches for arrival in batch.new_requests]
    assert arrivals == ["old", "young", "young"]
    assert results.tokens == {message.request_id: tokens_alone(message) for message in messages}


def test_under_priority_the_least_urgent_is_preempted_wherever_it_runs() -> None:
    core, runner = make_core(num_blocks=9, prefix_caching=False, policy="priority")
    late = core_request("least", range(10, 20), priority=9, ignore_eos=True, max_tokens=10)
    urgent = core_request("urgent", range(40, 50), priority=0, arrival_time=1.0, ignore_eos=True, max_tokens=10)
    results = Results()
    core.add_request(late)
    results.step(core)
    core.add_request(urgent)
    results.drain(core)
    arrivals = [arrival.request_id for batch in runner.batches for arrival in batch.new_requests]
    assert arrivals == ["least", "urgent", "least"]
    assert results.tokens == {m.request_id: tokens_alone(m) for m in (late, urgent)}


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("names", ["ab", "ba", "abc", "cab"])
def test_equals_under_priority_do_not_preempt_each_other_for_ever(mixed: bool, names: str) -> None:
    # All choices of one request have its priority and its arrival.
    caps = RunnerCapabilities(mixed_batches=mixed, chunk_sizes=(3,))
    core, _ = make_core(caps, num_blocks=10, prefix_caching=False, policy="priority")
    messages = [core_request(name, range(20), seed=ord(name), ignore_eos=True, max_tokens=None) for name in names]
    for message in messages:
        core.add_request(message)
    results = Results().drain(core, most_steps=500)
    assert results.tokens == {message.request_id: tokens_alone(message) for message in messages}


def test_what_a_victim_was_granted_earlier_in_the_step_is_taken_back() -> None:
    # `least` runs first in the batch and is granted its token; then `urgent` needs a block and takes it away again.
    core, runner = make_core(num_blocks=9, prefix_caching=False, policy="priority")
    results = Results()
    core.add_request(core_request("least", range(10, 19), priority=9, ignore_eos=True, max_tokens=12))
    results.step(core)
    core.add_request(core_request("urgent", range(40, 51), priority=0, ignore_eos=True, max_tokens=12))
    while not results.preemptions:
        results.step(core)
    assert runner.batches[-1].num_scheduled_tokens == {"urgent": 1}
    assert set(results.drain(core).finished) == {"least", "urgent"}


def test_nothing_is_admitted_in_a_step_that_preempts() -> None:
    core, runner = make_core(num_blocks=9, prefix_caching=False)
    results = Results()
    for name, first in (("a", 10), ("b", 40)):
        core.add_request(core_request(name, range(first, first + 10), ignore_eos=True, max_tokens=10))
    results.step(core)
    core.add_request(core_request("c", [60]))
    core.scheduler._max_num_seqs = 2
    while not results.preemptions:
        results.step(core)
    assert not runner.batches[-1].new_requests


def test_a_shared_prefix_is_computed_once() -> None:
    core, runner = make_core()
    prefix = list(range(20, 32))
    first = core_request("a", [*prefix, 50], max_tokens=3, ignore_eos=True)
    second = core_request("b", [*prefix, 51], max_tokens=3, ignore_eos=True)
    core.add_request(first)
    results = Results()
    results.step(core)
    core.add_request(second)
    results.drain(core)
    assert shapes(runner)[1] == {"a": 1, "b": 1}
    assert results.cached == {"a": 0, "b": 12}
    assert results.hit_tokens == 12
    assert results.tokens == {"a": tokens_alone(first), "b": tokens_alone(second)}


def test_batch_mates_of_one_step_share_a_prefix_too() -> None:
    core, runner = make_core()
    prompt = list(range(20, 30))
    for name in "abc":
        core.add_request(core_request(name, prompt, seed=ord(name), max_tokens=2))
    results = Results()
    results.step(core)
    assert shapes(runner) == [{"a": 10, "b": 2, "c": 2}]
    results.drain(core)


def test_a_finished_requests_blocks_serve_the_next_turn_of_a_conversation() -> None:
    core, _ = make_core()
    first = core_request("turn 1", range(20, 26), max_tokens=8, ignore_eos=True)
    core.add_request(first)
    results = Results().drain(core)
    core.add_request(core_request("turn 2", [*range(20, 26), *results.tokens["turn 1"], 33, 34]))
    results.drain(core)
    assert results.cached["turn 2"] == 12  # 13 of its 14 tokens were computed, in full blocks of 4


def test_an_end_token_stops_and_is_part_of_the_output() -> None:
    core, _ = make_core()
    message = next(m for seed in range(10000) if len(tokens_alone(m := core_request(seed=seed, max_tokens=8))) == 3)
    core.add_request(message)
    results = Results().drain(core)
    assert results.finished["a"] is FinishReason.STOP
    assert results.stop_reasons["a"] is None
    assert results.tokens["a"][-1] == 7


def test_a_stop_token_stops_and_is_named() -> None:
    core, _ = make_core()
    free = tokens_alone(core_request(max_tokens=6, ignore_eos=True))
    core.add_request(core_request(max_tokens=6, ignore_eos=True, stop_token_ids=[free[2]]))
    results = Results().drain(core)
    assert results.tokens["a"] == free[: free.index(free[2]) + 1]
    assert (results.finished["a"], results.stop_reasons["a"]) == (FinishReason.STOP, free[2])


def test_no_end_or_stop_token_ends_a_request_before_min_tokens() -> None:
    core, _ = make_core()
    messages = [
        core_request(str(seed), [seed], seed=seed, max_tokens=6, min_tokens=4, stop_token_ids=list(range(8, 40)))
        for seed in range(20)
    ]
    for message in messages:
        core.add_request(message)
    results = Results().drain(core)
    assert all(len(tokens) >= 4 for tokens in results.tokens.values())
    assert results.tokens == {message.request_id: tokens_alone(message) for message in messages}


def test_a_request_ends_where_the_context_ends() -> None:
    core, _ = make_core(max_model_len=8)
    core.add_request(core_request("a", [1, 2, 3, 4, 5, 6], max_tokens=None, ignore_eos=True))
    results = Results().drain(core)
    assert len(results.tokens["a"]) == 2
    assert results.finished["a"] is FinishReason.LENGTH


def test_a_request_resumes_behind_the_tokens_that_it_has() -> None:
    core, runner = make_core()
    message = core_request("a", [1, 2, 3], max_tokens=8, ignore_eos=True, seed=4)
    whole = tokens_alone(message)
    core.add_request(core_request("a", [1, 2, 3], output=whole[:5], max_tokens=8, ignore_eos=True, seed=4))
    results = Results().drain(core)
    assert results.tokens["a"] == whole[5:]
    assert runner.batches[0].new_requests[0].num_prompt_tokens == 3


@pytest.mark.parametrize("when", ["waiting", "running", "preempted"])
def test_an_aborted_request_leaves_nothing_behind_and_yields_nothing_more(when: str) -> None:
    core, runner = make_core(num_blocks=9, prefix_caching=False, max_num_seqs=2)
    results = Results()
    core.add_request(core_request("other", range(10, 20), ignore_eos=True, max_tokens=10))
    core.add_request(core_request("gone", range(40, 50), ignore_eos=True, max_tokens=10))
    if when != "waiting":
        results.step(core)
    while when == "preempted" and not results.preemptions:
        results.step(core)
    seen = len(results.tokens.get("gone", []))
    core.abort_requests(["gone", "never there"])
    core.check_integrity()
    results.drain(core)
    assert len(results.tokens.get("gone", [])) == seen
    assert "gone" not in results.finished
    assert core.scheduler.kv.pool.num_free == 8
    assert runner.known == {}


def test_the_same_id_can_come_back_right_after_an_abort() -> None:
    core, _ = make_core()
    results = Results()
    core.add_request(core_request("a", range(10, 20), ignore_eos=True))
    results.step(core)
    core.abort_requests(["a"])
    again = core_request("a", range(30, 35), max_tokens=4)
    core.add_request(again)
    results.tokens.clear()
    results.drain(core)
    assert results.tokens["a"] == tokens_alone(again)


def test_removals_reach_the_runner_even_when_no_request_is_left() -> None:
    core, runner = make_core()
    core.add_request(core_request("a", max_tokens=1))
    results = Results()
    results.step(core)
    assert results.finished
    assert core.has_work()
    results.step(core)
    assert runner.known == {}
    assert not core.has_work()


def test_an_id_in_use_is_refused() -> None:
    scheduler = Scheduler(fake_config().scheduler, KVCacheManager(8, 4), RunnerCapabilities(), 32)
    scheduler.add_request(request("a"))
    with pytest.raises(DuplicateRequestError, match="request a is in the engine already"):
        scheduler.add_request(request("a"))


def test_a_full_queue_refuses_and_names_its_limit() -> None:
    scheduler = Scheduler(
        fake_config(max_num_queued_requests=1).scheduler, KVCacheManager(8, 4), RunnerCapabilities(), 32
    )
    scheduler.add_request(request("a"))
    with pytest.raises(EngineFullError, match="the queue is full: 1 requests wait, and max_num_queued_requests is 1"):
        scheduler.add_request(request("b"))


def test_a_queue_full_of_tokens_refuses_until_one_of_its_requests_is_admitted_or_gone() -> None:
    scheduler = Scheduler(
        fake_config(max_num_queued_tokens=10).scheduler, KVCacheManager(8, 4), RunnerCapabilities(), 32
    )
    scheduler.add_request(request("a", range(6)))
    with pytest.raises(EngineFullError, match="6 tokens wait and the request has 5, and max_num_queued_tokens is 10"):
        scheduler.add_request(request("b", range(5)))
    scheduler.schedule()
    scheduler.add_request(request("b", range(5)))
    scheduler.abort_requests(["b"])
    scheduler.add_request(request("c", range(10)))
    scheduler.check_integrity()


def test_preempted_requests_take_no_place_in_a_bounded_queue() -> None:
    core, _ = make_core(num_blocks=9, prefix_caching=False, max_num_queued_requests=1)
    results = Results()
    for name, first in (("old", 10), ("young", 40)):
        core.add_request(core_request(name, range(first, first + 10), ignore_eos=True, max_tokens=10))
        results.step(core)
    while not results.preemptions:
        results.step(core)
    core.add_request(core_request("new", [60], max_tokens=1))
    assert results.drain(core).errors == {}


def test_a_long_prompt_leaves_budget_to_those_behind_it() -> None:
    core, runner = make_core(long_prefill_token_threshold=6, max_num_batched_tokens=10)
    core.add_request(core_request("long", range(20, 36), max_tokens=1))
    core.add_request(core_request("short", [50, 51, 52], max_tokens=1))
    Results().drain(core)
    assert shapes(runner) == [{"long": 6, "short": 3}, {"long": 6}, {"long": 4}]


def test_the_watermark_keeps_blocks_for_those_that_run_to_grow_into() -> None:
    def preemptions(watermark: float) -> int:
        core, _ = make_core(num_blocks=9, prefix_caching=False, watermark=watermark)
        for name, first in (("a", 10), ("b", 40)):
            core.add_request(core_request(name, range(first, first + 10), ignore_eos=True, max_tokens=10))
        return Results().drain(core).preemptions

    assert (preemptions(0.0), preemptions(0.4)) == (1, 0)


def test_the_watermark_keeps_nobody_out_where_nothing_runs() -> None:
    core, _ = make_core(num_blocks=9, prefix_caching=False, watermark=0.5)
    message = core_request("large", range(30), max_tokens=1)
    core.add_request(message)
    assert Results().drain(core).tokens == {"large": tokens_alone(message)}


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("scarce", [{"max_num_seqs": 1}, {"num_blocks": 9}], ids=["slots", "blocks"])
def test_an_urgent_request_displaces_a_less_urgent_one_which_goes_on_behind_it(
    mixed: bool, scarce: dict[str, int]
) -> None:
    core, runner = make_core(RunnerCapabilities(mixed_batches=mixed), policy="priority", prefix_caching=False, **scarce)
    least = core_request("least", range(10, 30), priority=5, ignore_eos=True, max_tokens=6)
    urgent = core_request("urgent", range(40, 60), priority=1, arrival_time=1.0, ignore_eos=True, max_tokens=3)
    results = Results()
    core.add_request(least)
    results.step(core)
    core.add_request(urgent)
    if not mixed:
        results.step(core)  # the turn of those that decode
    results.step(core)
    assert shapes(runner)[-1] == {"urgent": 20}
    results.drain(core)
    assert list(results.finished) == ["urgent", "least"]
    assert results.preemptions == 1
    assert results.tokens == {m.request_id: tokens_alone(m) for m in (least, urgent)}


def test_nobody_is_displaced_for_a_request_of_the_same_priority() -> None:
    core, _ = make_core(policy="priority", max_num_seqs=1)
    for name, arrival in (("late", 2.0), ("early", 1.0)):
        core.add_request(core_request(name, [3, 4], arrival_time=arrival, ignore_eos=True, max_tokens=4))
        Results().step(core)
    assert [r.request_id for r in core.scheduler.running] == ["late"]


def test_nobody_is_displaced_where_it_would_not_make_room_enough() -> None:
    core, _ = make_core(policy="priority", num_blocks=9, prefix_caching=False)
    results = Results()
    for name, priority, count in (("first", 0, 17), ("least", 9, 5)):  # 5 and 2 of 8 blocks
        core.add_request(core_request(name, range(count), priority=priority, ignore_eos=True, max_tokens=4))
    results.step(core)
    core.add_request(core_request("urgent", range(20, 37), priority=0, arrival_time=1.0, max_tokens=1))  # 5 blocks
    results.step(core)
    assert results.preemptions == 0
    assert [r.request_id for r in core.scheduler.running] == ["first", "least"]
    assert set(results.drain(core).finished) == {"first", "least", "urgent"}


def test_nobody_is_displaced_for_a_request_that_only_the_watermark_is_in_the_way_of() -> None:
    core, _ = make_core(policy="priority", num_blocks=9, prefix_caching=False, watermark=0.5)
    results = Results()
    core.add_request(core_request("least", range(10), priority=9, ignore_eos=True, max_tokens=2))  # 3 of 8 blocks
    results.step(core)
    core.add_request(core_request("urgent", range(20, 30), max_tokens=1))
    results.step(core)
    assert results.preemptions == 0
    assert set(results.finished) == {"least", "urgent"}


def test_statistics_account_for_every_block() -> None:
    core, _ = make_core(num_blocks=17)
    for name, first in (("a", 10), ("b", 40)):
        core.add_request(core_request(name, range(first, first + 9), max_tokens=4, ignore_eos=True))
    while core.has_work():
        stats = core.step().stats
        assert stats.kv_blocks_used + stats.kv_blocks_cached + stats.kv_blocks_free == stats.kv_blocks_total == 16
    # each request computed 12 tokens, the full blocks of which stay findable
    assert (stats.kv_blocks_used, stats.kv_blocks_cached) == (0, 6)


@pytest.mark.parametrize(
    ("options", "budget"),
    [
        ({}, 512),
        ({"device": "cpu", "max_num_seqs": 600}, 600),
        ({"device": "cuda"}, 2048),
        ({"max_num_batched_tokens": 100}, 100),
    ],
)
def test_a_step_on_a_cpu_has_the_smaller_budget_unless_the_operator_names_one(
    options: dict[str, Any], budget: int
) -> None:
    config = EngineArgs(model="m", **options).create_engine_config()
    assert config.scheduler.max_num_batched_tokens == budget
