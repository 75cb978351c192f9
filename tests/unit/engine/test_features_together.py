"""All that a request may ask for and all that may happen to it, at once: its output is what it gets alone.

Grammars, drafts, adapters, priorities, short memory, aborts, prompt log-probabilities and stops, in random mixtures.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from headrace_engine.core.engine_core import EngineCore
from headrace_engine.grammar import grammar as grammar_module
from headrace_engine.options.config import LoRAConfig
from headrace_engine.options.speculative_config import SpeculativeConfig
from headrace_engine.requests.request import EngineCoreRequest, FinishReason
from headrace_engine.runner.contracts import RunnerCapabilities
from unit.engine.fake_runner import FakeRunner, fake_config
from unit.engine.letters import encode
from unit.engine.requests import Results, core_request, load_at_once

MAX_MODEL_LEN = 64
FORMS = [
    {"regex": "(abcabc|abcd){3,8}"},
    {"regex": "a{1,30}"},
    {"json": {"type": "array", "items": {"enum": ["a", "bc", 7]}, "minItems": 3, "maxItems": 5}},
    {"grammar": 'start: "ab"{5} | "ac" NEVER\nNEVER: /x.*/ & /y.*/'},
    {"regex": "(a"},
]


def engine(random: Random) -> EngineCore:
    """With an odd choice of limits, either for adapters and drafts or for static shapes."""
    options: dict[str, Any] = {
        "num_blocks": random.choice([17, 20, 24, 40]),
        "max_num_seqs": random.randint(1, 6),
        "max_num_batched_tokens": random.choice([3, 8, 16, 64]),
        "policy": random.choice(["fcfs", "priority"]),
        "prefix_caching": random.random() < 0.8,
        "watermark": random.choice([0, 0.1, 0.3]),
        "long_prefill_token_threshold": random.choice([0, 3]),
    }
    most_loras, num_drafts = random.randint(1, 2), 0
    if random.random() < 0.25:
        caps = RunnerCapabilities(mixed_batches=False, max_prefills_per_step=1, chunk_sizes=[4, 8], max_batch=4)
    else:
        caps = RunnerCapabilities(lora=True, verifies_drafts=True)
        options["lora"] = LoRAConfig(max_loras=most_loras, max_cpu_loras=random.randint(2, 3))
        method = random.choice(["ngram", "draft_model"])
        options["speculative"] = speculative = SpeculativeConfig(
            method=method,  # type: ignore[arg-type]
            num_speculative_tokens=random.randint(1, 5),
            prompt_lookup_min=1,
            prompt_lookup_max=2,
        )
        num_drafts = speculative.num_speculative_tokens if method == "draft_model" else 0
    runner = FakeRunner(
        caps=caps,
        num_drafts=num_drafts,
        max_model_len=MAX_MODEL_LEN,
        max_tokens_per_step=options["max_num_batched_tokens"],
        max_requests=options["max_num_seqs"],
        max_adapters=most_loras,
    )
    return with_loader(EngineCore(fake_config(**options), runner))


def with_loader(core: EngineCore) -> EngineCore:
    if core.loras is not None:
        load_at_once(core.loras)
    return core


def message(random: Random, name: str, *, loras: bool) -> EngineCoreRequest:
    params: dict[str, Any] = {"max_tokens": random.choice([1, 2, 8, 30, None])}
    if random.random() < 0.4:
        params["structured_outputs"] = random.choice(FORMS)
    if random.random() < 0.3:
        params["prompt_logprobs"] = 1
    if random.random() < 0.3:
        params["min_tokens"] = random.randint(1, params["max_tokens"] or 6)
    if random.random() < 0.3:
        params["stop_token_ids"] = [random.randrange(8, 20)]
    if random.random() < 0.3:
        params["repetition_detection"] = {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 2}
    return core_request(
        name,
        encode(random.choice(["abcab", "cabbc"]) * 8)[: random.choice([1, 3, 9, 20, 40])],
        seed=random.randrange(1000),
        priority=random.randint(0, 3),
        arrival_time=random.random(),
        lora=random.choice(["a", "b", "c", None]) if loras else None,
        ignore_eos=random.random() < 0.3,
        **params,
    )


def alone(request: EngineCoreRequest) -> Results:
    lora = LoRAConfig() if request.lora_request is not None else None
    runner = FakeRunner(caps=RunnerCapabilities(lora=True), max_model_len=MAX_MODEL_LEN)
    core = with_loader(EngineCore(fake_config(lora=lora), runner))
    core.add_request(request)
    return Results().drain(core)


def run(core: EngineCore, requests: list[EngineCoreRequest], random: Random) -> tuple[Results, set[str]]:
    """Requests come, and some go, while others run. Returns the ids of the aborted ones, too."""
    results, aborted, coming = Results(), set(), list(requests)
    for _ in range(3000):
        while coming and random.random() < 0.5:
            core.add_request(coming.pop(0))
        if random.random() < 0.1:
            name = random.choice(requests).request_id
            if name not in results.finished:
                core.abort_requests([name])
                aborted.add(name)
                coming = [request for request in coming if request.request_id != name]
        if core.has_work():
            results.step(core)
        elif not coming:
            return results, aborted
    raise AssertionError("no progress")


@pytest.mark.parametrize("seed", range(60))
def test_a_request_gets_what_it_gets_alone_and_leaves_nothing_behind(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(seed)
    if seed % 2:  # automata of grammars that are full after a few tokens
        monkeypatch.setattr(grammar_module, "_MAX_LEXER_STATES", 60)
        monkeypatch.setattr(grammar_module, "_MAX_SHARED_TOKENS", 30)
    core = engine(random)
    requests = [message(random, str(i), loras=core.loras is not None) for i in range(random.randint(1, 14))]
    results, aborted = run(core, requests, random)
    core.check_integrity()
    pool = core.scheduler.kv.pool
    assert (len(core.scheduler.grammars), pool.num_free, core.runner.known) == (0, pool.num_usable, {})  # type: ignore[attr-defined]
    for request in requests:
        name, own = request.request_id, alone(request)
        if name in aborted:
            continue
        assert results.tokens[name] == own.tokens[name]
        assert results.finished[name] is own.finished[name]
        assert results.stop_reasons[name] == own.stop_reasons[name]
        assert results.prompt_logprobs.get(name) == own.prompt_logprobs.get(name)
        if own.finished[name] is not FinishReason.ERROR:
            cut = random.randint(1, len(own.tokens[name]))
            request.output_token_ids = own.tokens[name][:cut]
            core.add_request(request)
            rest = Results().drain(core)
            assert rest.tokens[name] == own.tokens[name][cut:]
            assert (rest.finished[name], rest.stop_reasons[name]) == (own.finished[name], own.stop_reasons[name])
