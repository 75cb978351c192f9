"""Slots for recurrent states: who has one, which snapshots are taken, kept and dropped, and what a hit needs."""

from __future__ import annotations

import pytest

from headrace_engine.core.engine_core import EngineCore
from headrace_engine.core.kv_cache_manager import num_kv_blocks
from headrace_engine.core.state_slots import num_state_slots
from headrace_engine.errors import ConfigError
from headrace_engine.options.speculative_config import SpeculativeConfig
from headrace_engine.runner.contracts import RunnerCapabilities
from unit.engine.fake_runner import BYTES_PER_BLOCK, FakeRunner, fake_config, tokens_alone
from unit.engine.requests import Results, core_request

LONG = list(range(20, 31))  # 11 tokens: two full blocks of 4 and three tokens


def make_core(bytes_per_state: int = 1, **options: object) -> tuple[EngineCore, FakeRunner]:
    runner = FakeRunner(bytes_per_state=bytes_per_state)
    return EngineCore(fake_config(**options), runner), runner  # type: ignore[arg-type]


def snapshots(runner: FakeRunner) -> list[tuple[str, int]]:
    """All snapshots so far: the request, and after how many of its tokens."""
    return [
        (request_id, snapshot.num_tokens)
        for batch in runner.batches
        for request_id, found in batch.state_snapshots.items()
        for snapshot in found
    ]


def hits_of(core: EngineCore, prompt: list[int]) -> int:
    """Cached tokens of one more request, which ends after a token."""
    results = Results()
    core.add_request(core_request("probe", prompt, max_tokens=1))
    results.drain(core)
    return results.cached["probe"]


def test_a_prompt_leaves_a_snapshot_at_its_last_border_and_the_same_prompt_hits_it() -> None:
    core, runner = make_core()
    core.add_request(core_request("a", LONG, max_tokens=1))
    Results().drain(core)
    assert snapshots(runner) == [("a", 8)]
    assert hits_of(core, LONG) == 8


def test_a_prompt_that_ends_at_a_border_has_its_snapshot_at_the_one_before() -> None:
    core, runner = make_core()
    core.add_request(core_request("a", LONG[:8], max_tokens=1))
    Results().drain(core)
    assert snapshots(runner) == [("a", 4)]
    assert hits_of(core, LONG[:8]) == 4


def test_cached_blocks_without_a_snapshot_are_computed_again_and_get_one_where_prompts_part() -> None:
    core, runner = make_core()
    for name, end in (("a", 50), ("b", 51), ("c", 52)):
        core.add_request(core_request(name, [*LONG[:6], end, 1, 2, 3], max_tokens=1))
        Results().drain(core)
    # a: the last border. b: one block in common with a, without a snapshot. c: hits it
    assert snapshots(runner) == [("a", 8), ("b", 4), ("b", 8), ("c", 8)]
    arrivals = [arrival for batch in runner.batches for arrival in batch.new_requests]
    assert [arrival.num_computed_tokens for arrival in arrivals] == [0, 0, 4]


def test_the_snapshot_of_a_request_moves_while_it_generates_and_that_of_its_prompt_stays() -> None:
    core, runner = make_core()
    message = core_request("a", LONG, max_tokens=15, ignore_eos=True)
    core.add_request(message)
    tokens = Results().drain(core).tokens["a"]
    assert snapshots(runner) == [("a", 8), ("a", 12), ("a", 16), ("a", 20), ("a", 24)]
    assert hits_of(core, [*LONG, *tokens[:6]]) == 8, "the snapshots after 12 and 16 tokens moved"
    assert hits_of(core, [*LONG, *tokens, 1]) == 24


def test_a_long_prompt_holds_one_snapshot_while_its_chunks_are_computed() -> None:
    core, runner = make_core(max_num_batched_tokens=5)
    core.add_request(core_request("a", range(20, 40), max_tokens=1))
    Results().drain(core)
    assert snapshots(runner) == [("a", 4), ("a", 8), ("a", 12), ("a", 16)]
    slots = [found[0].slot for batch in runner.batches for found in batch.state_snapshots.values()]
    assert len(set(slots)) == 1


def test_a_preempted_request_continues_from_its_snapshot() -> None:
    core, runner = make_core(num_blocks=9)  # 8 blocks of 4 tokens for two times 20 tokens
    messages = [
        core_request(name, range(first, first + 10), ignore_eos=True, max_tokens=10)
        for name, first in (("old", 10), ("young", 40))
    ]
    for message in messages:
        core.add_request(message)
    results = Results().drain(core)
    assert results.preemptions == 1
    again = [arrival for batch in runner.batches for arrival in batch.new_requests][-1]
    assert again.request_id == "young"
    assert again.num_computed_tokens >= 8
    assert again.state_source is not None
    assert results.tokens == {message.request_id: tokens_alone(message) for message in messages}


def test_batch_mates_with_one_prompt_take_one_snapshot() -> None:
    core, runner = make_core()
    for name in "abc":
        core.add_request(core_request(name, LONG, max_tokens=1))
    Results().drain(core)
    assert len(snapshots(runner)) == 1


def test_the_least_recently_used_snapshot_is_dropped_first() -> None:
    core, _ = make_core(10 * BYTES_PER_BLOCK, num_blocks=None)  # three slots: one runs, two snapshots
    prompts = [[first, *LONG] for first in (1, 2, 3)]
    assert [hits_of(core, prompt) for prompt in (prompts[0], prompts[1], prompts[0])] == [0, 0, 8]
    assert hits_of(core, prompts[2]) == 0  # takes the slot of the second
    assert hits_of(core, prompts[0]) == 8
    assert hits_of(core, prompts[1]) == 0


def test_the_only_slot_passes_from_a_snapshot_to_the_request_that_starts_from_it() -> None:
    core, runner = make_core(32 * BYTES_PER_BLOCK, num_blocks=None, max_num_seqs=4)
    core.add_request(core_request("a", LONG, max_tokens=1))
    core.add_request(core_request("b", LONG, max_tokens=1))
    Results().drain(core)
    assert all(len(batch.num_scheduled_tokens) <= 1 for batch in runner.batches), "one slot, so one request runs"
    core.scheduler.check_integrity()


def test_without_prefix_caching_there_are_no_snapshots() -> None:
    core, runner = make_core(prefix_caching=False)
    core.add_request(core_request("a", LONG, max_tokens=15))
    Results().drain(core)
    assert snapshots(runner) == []
    assert runner.states and len(runner.states) == 8, "one slot for each of max_num_seqs"


def test_a_reset_of_the_prefix_cache_forgets_snapshots() -> None:
    core, _ = make_core()
    assert hits_of(core, LONG) == 0
    assert core.call("reset_prefix_cache").result() is True
    assert hits_of(core, LONG) == 0
    core.check_integrity()


def test_states_are_part_of_the_kv_memory() -> None:
    spec = FakeRunner(bytes_per_state=10 * BYTES_PER_BLOCK).kv_spec()  # 64 blocks of memory
    config = fake_config(num_blocks=None, max_num_seqs=8)
    assert num_state_slots(config, spec) == 3  # half of the memory
    assert num_kv_blocks(config, spec, 32, 3) == 34
    assert num_state_slots(config, FakeRunner().kv_spec()) == 0


def test_a_state_larger_than_half_of_the_memory_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="more than half of the KV memory: give more by kv_cache_memory"):
        make_core(33 * BYTES_PER_BLOCK, num_blocks=None)


@pytest.mark.parametrize(
    "options",
    [{"speculative": SpeculativeConfig(method="ngram", num_speculative_tokens=2)}, {"async_scheduling": True}],
)
def test_options_that_take_tokens_back_are_refused(options: dict[str, object]) -> None:
    runner = FakeRunner(caps=RunnerCapabilities(verifies_drafts=True, launches_ahead=True), bytes_per_state=1)
    with pytest.raises(ConfigError, match="has recurrent layers, whose states cannot be taken back"):
        EngineCore(fake_config(**options), runner)  # type: ignore[arg-type]
