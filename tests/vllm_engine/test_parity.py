"""vLLM behind the frames generates what it is known to generate."""

from __future__ import annotations

import json
from typing import Any

from headrace_engine.requests.sampling_params import SamplingParams
from vllm_engine.conftest import BENCHMARKS
from vllm_engine.driven_engine import Case, DrivenEngine


def test_the_requests_of_the_benchmark_are_token_identical_to_the_known_output(
    engine: DrivenEngine, workload: list[dict[str, Any]]
) -> None:
    """With so little KV memory, some are preempted on the way."""
    expected = json.loads((BENCHMARKS / "expected_fp32.json").read_text())
    answers = engine.run(
        [
            Case(
                row["prompt_token_ids"],
                SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=row["max_tokens"]),
            )
            for row in workload
        ]
    )
    assert [answer.tokens for answer in answers] == expected
    assert sum(len(step.admitted_choice_ids) for step in engine.stats) == len(workload)
    assert sum(step.preemptions for step in engine.stats) > 0


def test_the_model_and_what_the_engine_can_do_are_told(engine: DrivenEngine) -> None:
    capabilities = engine.process.capabilities
    assert engine.info.num_parameters == 134_515_008
    assert engine.info.weights
    assert engine.info.eos_token_ids == [2]
    assert capabilities.draws is not None and capabilities.draws.startswith("vllm-0.")
    assert capabilities.exact_resume in ("all", "greedy")
    assert capabilities.temperature_range == (0.01, 2.0)
    assert not capabilities.logits_processors
    assert "kv_blocks_cached" not in capabilities.stats
