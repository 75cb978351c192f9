"""How well a model expects prompts of the benchmark: what an option that rounds is measured by."""

from __future__ import annotations

import json
import math
from pathlib import Path

from headrace_engine import LLM, SamplingParams

WORKLOAD = Path(__file__).parents[2] / "benchmarks" / "workload.jsonl"


def prompts(count: int, longest: int = 200) -> list[list[int]]:
    """The first ones of 64 to `longest` tokens."""
    lines = WORKLOAD.read_text().splitlines()
    return [ids for line in lines if 64 <= len(ids := json.loads(line)["prompt_token_ids"]) <= longest][:count]


def perplexity(llm: LLM, texts: list[list[int]]) -> float:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    total, count = 0.0, 0
    for output in llm.generate(texts, params, use_tqdm=False):
        assert output.prompt_logprobs is not None
        for token, entries in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            assert entries is not None
            total -= entries[token].logprob
            count += 1
    return math.exp(total / count)
