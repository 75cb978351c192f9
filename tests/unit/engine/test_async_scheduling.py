"""Steps that are scheduled while the one before is in flight: the same tokens, and nothing of what has ended since.

`test_engine_core.py` searches the interleavings; here stands one rule a test.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace_engine.core.engine_core import EngineCore
from headrace_engine.errors import ConfigError
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.requests.request import FinishReason
from headrace_engine.runner.contracts import RunnerCapabilities
from unit.engine.fake_runner import EOS, FakeRunner, fake_config, tokens_alone
from unit.engine.requests import Results, core_request

LAUNCHES = RunnerCapabilities(launches_ahead=True, verifies_drafts=True)


def make_core(**options: int | str) -> tuple[EngineCore, FakeRunner]:
    runner = FakeRunner(caps=LAUNCHES)
    return EngineCore(fake_config(async_scheduling=True, **options), runner), runner  # type: ignore[arg-type]


def test_a_step_is_launched_while_the_one_before_it_is_in_flight() -> None:
    core, runner = make_core()
    message = core_request(max_tokens=6, ignore_eos=True)
    core.add_request(message)
    assert core.step().outputs == []
    assert core.has_work()
    results = Results().drain(core)
    assert results.tokens == {"a": tokens_alone(message)}
    assert runner.num_ahead == 5


def test_no_step_is_launched_behind_the_last_token_that_a_request_may_have() -> None:
    core, runner = make_core()
    for name, max_tokens in (("a", 1), ("b", 4), ("c", None)):
        core.add_request(core_request(name, max_tokens=max_tokens, ignore_eos=True))
    results = Results().drain(core)
    computed = [sum(batch.num_scheduled_tokens.get(name, 0) for batch in runner.batches) for name in "abc"]
    assert computed == [2 + len(results.tokens[name]) for name in "abc"]  # all but the last one of each


def test_what_a_step_in_flight_drew_behind_an_end_token_is_dropped() -> None:
    core, runner = make_core()
    message = next(
        message
        for message in (core_request(seed=seed, max_tokens=20) for seed in range(1000))
        if tokens_alone(message)[-1] == EOS and len(tokens_alone(message)) in (4, 5)
    )
    core.add_request(message)
    results = Results().drain(core)
    assert results.tokens == {"a": tokens_alone(message)}
    assert results.finished == {"a": FinishReason.STOP}
    assert len(runner.batches) == len(tokens_alone(message)) + 2  # one step too many, and one that tells the removal
    assert runner.known == {}


def test_a_request_that_is_preempted_in_flight_goes_on_with_the_token_that_was() -> None:
    core, runner = make_core(num_blocks=9)
    burst = [core_request(name, max_tokens=14, ignore_eos=True, seed=seed) for seed, name in enumerate("abc")]
    for message in burst:
        core.add_request(message)
    results = Results().drain(core)
    assert results.preemptions > 0
    assert runner.num_ahead > 10
    assert results.tokens == {message.request_id: tokens_alone(message) for message in burst}


def test_a_request_that_ends_after_it_was_preempted_in_flight_waits_no_more() -> None:
    core, _ = make_core(num_blocks=9)
    endings = [core_request("a", max_tokens=30, ignore_eos=True)]
    results = Results()
    core.add_request(endings[0])
    late = core_request("b", [4, 5, 6], max_tokens=2, ignore_eos=True, priority=1)
    core.add_request(late)
    results.step(core)
    results.step(core)  # the last token of b is in flight
    core.scheduler._preempt(core.scheduler.requests["b"])
    results.step(core)
    assert results.finished == {"b": FinishReason.LENGTH}
    results.drain(core)
    assert results.tokens == {message.request_id: tokens_alone(message) for message in (*endings, late)}


def test_a_victim_does_not_come_back_before_its_token_in_flight_is_known() -> None:
    core, _ = make_core(num_blocks=9, policy="priority", prefix_caching=False)
    filler = core_request("filler", range(10, 19), max_tokens=20, ignore_eos=True)
    victim = core_request("victim", range(20, 27), max_tokens=5, ignore_eos=True, priority=5)
    urgent = core_request("urgent", range(30, 39), max_tokens=3, ignore_eos=True)
    results = Results()
    for message in (filler, victim):
        core.add_request(message)
    results.step(core)
    results.step(core)
    core.add_request(urgent)
    results.step(core)  # the victim had just got a third block, and would fit into the two that are left
    assert results.preemptions == 1
    results.drain(core)
    assert results.tokens == {message.request_id: tokens_alone(message) for message in (filler, victim, urgent)}


def test_the_same_id_can_come_back_while_the_old_ones_step_is_in_flight() -> None:
    core, _ = make_core()
    core.add_request(core_request(seed=1, max_tokens=9, ignore_eos=True))
    core.step()
    core.abort_requests(["a"])
    again = core_request(seed=2, max_tokens=3, ignore_eos=True)
    core.add_request(again)
    assert Results().drain(core).tokens == {"a": tokens_alone(again)}


def test_a_step_that_the_runner_waited_for_is_taken_in_at_once() -> None:
    runner = FakeRunner(caps=LAUNCHES, waits_at=lambda _: True)
    core = EngineCore(fake_config(async_scheduling=True), runner)
    core.add_request(core_request(max_tokens=3, ignore_eos=True))
    assert [len(core.step().outputs) for _ in range(3)] == [1, 1, 1]
    assert runner.num_ahead == 0


def test_a_step_behind_a_token_that_turns_out_to_be_another_one_is_computed_again() -> None:
    core, runner = make_core()
    runner.redraws_at = lambda number: number % 2 == 0
    burst = [core_request(name, max_tokens=13, ignore_eos=True, seed=seed) for seed, name in enumerate("ab")]
    for message in burst:
        core.add_request(message)
    results = Results().drain(core)
    assert results.tokens == {message.request_id: tokens_alone(message) for message in burst}
    assert len(runner.batches) > 15
    late = core_request("late", [*burst[0].prompt_token_ids, *results.tokens["a"]], max_tokens=2, ignore_eos=True)
    core.add_request(late)  # what the cache has of the first one is what it wrote at last
    assert Results().drain(core).tokens == {"late": tokens_alone(late)}


@pytest.mark.parametrize("waits_at", [lambda _: False, lambda number: number % 3 == 0], ids=["never", "sometimes"])
def test_the_statistics_of_all_steps_together_miss_none(waits_at: Callable[[int], bool]) -> None:
    runner = FakeRunner(caps=LAUNCHES, waits_at=waits_at, padding=1)
    core = EngineCore(fake_config(async_scheduling=True), runner)
    core.add_request(core_request(max_tokens=6, ignore_eos=True))
    stats = []
    while core.has_work():
        stats.append(core.step().stats)
    assert sum(step.num_padded_tokens for step in stats) == 6
    assert sum(step.phase_seconds.get("forward", 0.0) for step in stats) == 6.0
    assert [step.compiled_graphs for step in stats[1:]] == [3] * (len(stats) - 1)


def test_a_runner_that_launches_nothing_ahead_refuses() -> None:
    with pytest.raises(ConfigError, match="async_scheduling is set, but the runner on none does not launch steps"):
        EngineCore(fake_config(async_scheduling=True), FakeRunner())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"device": "cpu"}, "async_scheduling is set, but only device cuda launches steps ahead, not cpu"),
        (
            {"device": "cuda", "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "async_scheduling and speculative_config exclude each other",
        ),
    ],
)
def test_options_that_do_not_go_with_it_are_refused(options: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        EngineArgs(model="x", async_scheduling=True, **options).create_engine_config()  # type: ignore[arg-type]
