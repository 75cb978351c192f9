"""Drafts: greedy output is what it was, and nothing is promised of draws."""

from __future__ import annotations

import json
from typing import Any

from headrace_engine.requests.sampling_params import SamplingParams
from vllm_engine.conftest import BENCHMARKS
from vllm_engine.driven_engine import Case, DrivenEngine

TOKENS = 40


def test_drafts_change_no_greedy_token_and_are_counted(options: dict[str, Any], workload: list[dict[str, Any]]) -> None:
    expected = json.loads((BENCHMARKS / "expected_fp32.json").read_text())
    long = [place for place in range(len(workload)) if len(expected[place]) >= TOKENS]
    places = sorted(long, key=lambda place: workload[place]["prompt_len"])[:6]
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    engine = DrivenEngine(**options, speculative_config=drafts)
    try:
        capabilities = engine.process.capabilities
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=TOKENS)
        cases = [Case(workload[place]["prompt_token_ids"], params) for place in places]
        whole = engine.run(cases)
        drafted = [
            sum(counts)
            for counts in zip(*(s.drafted_per_position for s in engine.stats if s.drafted_per_position), strict=True)
        ]
        cut = engine.run([Case(c.prompt, params, emitted=w.tokens[:9]) for c, w in zip(cases, whole, strict=True)])
    finally:
        engine.close()
    assert [answer.tokens for answer in whole] == [expected[place][:TOKENS] for place in places]
    assert [answer.tokens for answer in cut] == [answer.tokens[9:] for answer in whole]
    assert len(drafted) == 3 and drafted[0] > 0
    assert (capabilities.draws, capabilities.exact_resume) == (None, "greedy")
    assert {"drafted_per_position", "accepted_per_position"} <= set(capabilities.stats)
