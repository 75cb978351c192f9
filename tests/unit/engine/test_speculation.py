"""Drafts in the scheduler: what they may cost, and what becomes of those that are right, wrong or too many."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_engine.core.engine_core import EngineCore
from headrace_engine.errors import ConfigError
from headrace_engine.options.config import EngineConfig
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.options.speculative_config import SpeculativeConfig
from headrace_engine.requests.request import FinishReason
from headrace_engine.runner.contracts import RunnerCapabilities
from unit.engine.fake_runner import MAX_MODEL_LEN, FakeRunner, fake_config, tokens_alone
from unit.engine.requests import Results, core_request


def make_core(num_drafts: int = 3, **options: Any) -> tuple[EngineCore, FakeRunner]:
    """A core whose runner drafts by itself, mostly right."""
    speculative = SpeculativeConfig(method="draft_model", num_speculative_tokens=num_drafts, model="draft")
    config = fake_config(speculative=speculative, **options)
    runner = FakeRunner(
        caps=RunnerCapabilities(verifies_drafts=True),
        max_tokens_per_step=config.scheduler.max_num_batched_tokens,
        max_requests=config.scheduler.max_num_seqs,
        num_drafts=num_drafts,
    )
    return EngineCore(config, runner), runner


def shapes(runner: FakeRunner) -> list[dict[str, int]]:
    return [batch.num_scheduled_tokens for batch in runner.batches if batch.num_scheduled_tokens]


def test_right_drafts_save_steps_and_change_no_token() -> None:
    core, runner = make_core()
    message = core_request("a", [1], max_tokens=24, ignore_eos=True)
    core.add_request(message)
    drafted = accepted = 0
    tokens: list[int] = []
    while core.has_work():
        news = core.step()
        core.check_integrity()
        drafted += sum(news.stats.drafted_per_position)
        accepted += sum(news.stats.accepted_per_position)
        tokens += [token for output in news.outputs for token in output.new_token_ids]
    assert tokens == tokens_alone(message)
    assert 0 < accepted < drafted
    assert len(shapes(runner)) == 24 - accepted


def test_acceptance_is_counted_by_position() -> None:
    core, _ = make_core()
    core.add_request(core_request("a", [1], max_tokens=24, ignore_eos=True))
    for _ in range(4):
        stats = core.step().stats
        assert len(stats.drafted_per_position) in (0, 3)
        # A draft is only right behind right ones.
        assert stats.accepted_per_position == sorted(stats.accepted_per_position, reverse=True)


def test_verified_drafts_are_a_decode_step() -> None:
    core, _ = make_core()
    core.add_request(core_request("a", [1, 2], max_tokens=12, ignore_eos=True))
    results = Results().drain(core)
    assert results.kinds[0] == "prefill"
    assert set(results.kinds[1:]) == {"decode"}


def test_drafts_leave_a_token_of_the_budget_to_everybody_behind_them() -> None:
    core, runner = make_core(max_num_batched_tokens=5)
    for name in "abc":
        core.add_request(core_request(name, [1], max_tokens=6, ignore_eos=True))
    Results().drain(core)
    assert shapes(runner)[1] == {"a": 3, "b": 1, "c": 1}


def test_nobody_is_preempted_for_a_guess() -> None:
    # Eight blocks of four tokens: both requests fit exactly when neither holds a block for drafts alone.
    core, _ = make_core(num_blocks=9)
    messages = [core_request(name, [1, 2, 3], max_tokens=13, ignore_eos=True) for name in "ab"]
    for message in messages:
        core.add_request(message)
    results = Results().drain(core)
    assert results.preemptions == 0
    assert results.tokens == {message.request_id: tokens_alone(message) for message in messages}


@pytest.mark.parametrize("max_tokens", range(1, 8))
def test_no_draft_reaches_beyond_max_tokens(max_tokens: int) -> None:
    core, runner = make_core()
    core.add_request(core_request("a", [1], max_tokens=max_tokens, ignore_eos=True))
    results = Results().drain(core)
    assert len(results.tokens["a"]) == max_tokens
    assert results.finished["a"] is FinishReason.LENGTH
    assert sum(sum(shape.values()) for shape in shapes(runner)) - len(shapes(runner)) < max(max_tokens, 2)


@pytest.mark.parametrize("prompt_length", range(MAX_MODEL_LEN - 6, MAX_MODEL_LEN))
def test_no_draft_reaches_beyond_the_context(prompt_length: int) -> None:
    core, _ = make_core()
    message = core_request("a", [1] * prompt_length, max_tokens=None, ignore_eos=True)
    core.add_request(message)
    assert Results().drain(core).tokens["a"] == tokens_alone(message)


def test_tokens_behind_an_end_token_are_dropped_though_their_drafts_were_right() -> None:
    ends = dropped = 0
    for seed in range(60):
        core, runner = make_core()
        message = core_request("a", [3], seed=seed, max_tokens=28)
        core.add_request(message)
        results = Results()
        while core.has_work():
            known = runner.known.get("a")
            results.step(core)
            if "a" in results.finished and known is not None:
                dropped += len(known.token_ids) > 1 + len(results.tokens["a"])
        assert results.tokens["a"] == tokens_alone(message)
        ends += results.finished["a"] is FinishReason.STOP
    assert ends > 10
    assert dropped > 3


def test_blocks_are_offered_to_others_only_with_verified_tokens() -> None:
    # The second request's prompt is the first one's whole text; the runner reads back what every block holds.
    core, _ = make_core(num_blocks=40)
    first = core_request("a", [1, 2, 3, 4, 5], max_tokens=18, ignore_eos=True)
    core.add_request(first)
    results = Results()
    for _ in range(4):
        results.step(core)
    second = core_request("b", [*first.prompt_token_ids, *results.tokens["a"]], max_tokens=4)
    core.add_request(second)
    results.drain(core)
    assert results.hit_tokens >= 8
    assert results.tokens == {"a": tokens_alone(first), "b": tokens_alone(second)}


def test_a_runner_that_cannot_verify_is_refused_at_the_start() -> None:
    config = fake_config(speculative=SpeculativeConfig(method="ngram", num_speculative_tokens=2))
    with pytest.raises(ConfigError, match="speculative_config is set, but the runner on none cannot verify drafts"):
        EngineCore(config, FakeRunner())


def speculative(**options: Any) -> SpeculativeConfig | None:
    return EngineArgs(model="m", speculative_config=options).create_engine_config().speculative


def test_lookup_bounds_default_to_each_other() -> None:
    config = speculative(method="ngram", num_speculative_tokens=3)
    assert config is not None
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (5, 5)
    config = speculative(method="ngram", num_speculative_tokens=3, prompt_lookup_max=4)
    assert config is not None
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (4, 4)
    config = speculative(method="ngram", num_speculative_tokens=3, prompt_lookup_min=2)
    assert config is not None
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (2, 2)


def test_the_options_survive_the_way_to_the_core() -> None:
    config = EngineArgs(
        model="m", speculative_config={"method": "draft_model", "num_speculative_tokens": 3, "model": "d"}
    ).create_engine_config()
    assert EngineConfig.from_wire(config.to_wire()) == config


@pytest.mark.parametrize(
    ("options", "problems"),
    [
        (
            {"method": "eagle", "num_speculative_tokens": 17, "depth": 1},
            [
                "names of speculative_config must be of method, num_speculative_tokens",
                "speculative_config.method must be one of ngram, draft_model, got 'eagle'",
                "speculative_config.num_speculative_tokens must be an integer from 1 to 16, got 17",
            ],
        ),
        (
            {"method": "draft_model", "prompt_lookup_min": 2},
            [
                "num_speculative_tokens must be an integer from 1 to 16, got None",
                "speculative_config.model must be a model folder with method draft_model, got None",
                "speculative_config.prompt_lookup_min must be left out with method draft_model, got 2",
            ],
        ),
        (
            {"method": "ngram", "num_speculative_tokens": True, "model": "x", "prompt_lookup_max": 0},
            [
                "num_speculative_tokens must be an integer from 1 to 16, got True",
                "prompt_lookup_max must be an integer from 1 to 64, got 0",
                "speculative_config.model must be left out with method ngram, got 'x'",
            ],
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_min": 4, "prompt_lookup_max": 2},
            ["prompt_lookup_min must be at most prompt_lookup_max, 2, got 4"],
        ),
        (7, ["speculative_config must be a map of method"]),
    ],
)
def test_wrong_options_are_all_named_at_the_door(options: Any, problems: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineArgs(model="m", speculative_config=options).create_engine_config()
    for problem in problems:
        assert problem in str(refused.value)
