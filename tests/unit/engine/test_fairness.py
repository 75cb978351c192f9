"""A runner that cannot mix prompts and decodes serves both in turn: nobody waits for more than one step of others."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_engine.core.engine_core import EngineCore
from headrace_engine.runner.contracts import RunnerCapabilities
from unit.engine.fake_runner import FakeRunner, fake_config, tokens_alone
from unit.engine.requests import Results, core_request

Arrival = tuple[int, int, int, int]
"""Steps since the last arrival, prompt tokens, output tokens, priority."""

arrivals = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 20), st.integers(1, 11), st.integers(0, 2)), min_size=1, max_size=30
)


def make_core(caps: RunnerCapabilities, **options: Any) -> tuple[EngineCore, FakeRunner]:
    config = fake_config(**options)
    runner = FakeRunner(caps=caps, max_requests=config.scheduler.max_num_seqs)
    return EngineCore(config, runner), runner


@given(
    arrivals=arrivals,
    most_prefills=st.sampled_from([1, 2, None]),
    chunks=st.sampled_from([None, (3,), (2, 8)]),
    num_blocks=st.sampled_from([9, 14, 64]),
    policy=st.sampled_from(["fcfs", "priority"]),
    max_num_seqs=st.integers(1, 6),
)
@settings(max_examples=200, deadline=None)
def test_decodes_and_prompts_wait_for_one_step_of_each_other(
    arrivals: list[Arrival],
    most_prefills: int | None,
    chunks: tuple[int, ...] | None,
    num_blocks: int,
    policy: str,
    max_num_seqs: int,
) -> None:
    caps = RunnerCapabilities(mixed_batches=False, max_prefills_per_step=most_prefills, chunk_sizes=chunks)
    core, runner = make_core(caps, num_blocks=num_blocks, policy=policy, max_num_seqs=max_num_seqs)
    scheduler = core.scheduler
    results = Results()
    messages = {}
    overdue = {"decode": 0, "prefill": 0}

    def step() -> None:
        decodable = {r.request_id for r in scheduler.running if r.num_tokens - r.num_computed_tokens == 1}
        prefillable = scheduler._prefill_is_possible()
        results.step(core)
        scheduled = set(runner.batches[-1].num_scheduled_tokens)
        preempted = core.scheduler.stats.preemptions
        if not decodable or scheduled & decodable or preempted:
            overdue["decode"] = 0
        else:
            overdue["decode"] += 1
        if not prefillable or scheduled - decodable or preempted:
            overdue["prefill"] = 0
        else:
            overdue["prefill"] += 1
        assert overdue["decode"] <= 1, "a step of prompts came behind another while somebody could decode"
        assert overdue["prefill"] <= 1, "a step of decodes came behind another while a prompt could be computed"

    for number, (pause, num_prompt, num_output, priority) in enumerate(arrivals):
        for _ in range(pause):
            if core.has_work():
                step()
        prompt = [(number * 7 + index) % 50 + 8 for index in range(num_prompt)]
        message = core_request(
            f"r{number}", prompt, seed=number, priority=priority, ignore_eos=True, max_tokens=num_output
        )
        messages[message.request_id] = message
        core.add_request(message)
    steps = 0
    while core.has_work():
        assert steps < 5000, "no progress"
        step()
        steps += 1
    assert results.tokens == {name: tokens_alone(message) for name, message in messages.items()}


def test_under_a_steady_stream_of_prompts_a_running_request_gets_every_second_step() -> None:
    core, runner = make_core(
        RunnerCapabilities(mixed_batches=False, max_prefills_per_step=1), max_num_seqs=32, num_blocks=200
    )
    results = Results()
    core.add_request(core_request("first", [10], ignore_eos=True, max_tokens=20))
    results.step(core)
    for number in range(38):
        core.add_request(core_request(f"r{number}", range(10, 20), ignore_eos=True, max_tokens=1))
        results.step(core)
    assert "first" in results.finished
    served = ["first" in batch.num_scheduled_tokens for batch in runner.batches[1:]]
    assert served == [True, False] * 19
