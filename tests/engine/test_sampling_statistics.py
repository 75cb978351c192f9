"""20,000 draws of the real sampler against exact probabilities, for every parameter that shapes the distribution.

The draws are the generator's own for one seed and 20,000 positions, so the statistic is a fixed number: a failure is a
wrong distribution or a changed generator, never bad luck. A correct sampler fails one of these tests for one seed in
a thousand; the seed below is not chosen, it is the first.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.runner.sampling.rng import uniform
from headrace_engine.runner.sampling.sampler import SamplingRow, create_token_rules, sample

pytestmark = pytest.mark.rotated("engine/headrace_engine/runner/sampling")

Floats = npt.NDArray[np.float64]

DRAWS = 20_000
ROWS = 2_000
"""Drawn in one batch."""
SEED = 1
VOCABULARY = 60
LOGITS: Floats = np.round(np.random.default_rng(0).normal(0.0, 1.6, VOCABULARY), 3)
PROMPT = [1, 5, 9, 9, 30]
OUTPUT = [2, 2, 2, 7, 30, 41, 41]
LEAST_PROBABILITY = 1e-3


def draw(params: SamplingParams, *, suppressed: list[int]) -> list[int]:
    rules = create_token_rules(params, [])
    draws = uniform([SEED] * DRAWS, range(DRAWS))
    logits = torch.tensor(LOGITS, dtype=torch.float32).expand(ROWS, VOCABULARY)
    tokens: list[int] = []
    for start in range(0, DRAWS, ROWS):
        rows = [
            SamplingRow(
                params=params,
                u=float(u),
                prompt_token_ids=PROMPT,
                output_token_ids=OUTPUT,
                suppressed_token_ids=suppressed,
                rules=rules,
            )
            for u in draws[start : start + ROWS]
        ]
        tokens += sample(logits, rows)[0]
    return tokens


def softmax(scores: Floats) -> Floats:
    weights = np.exp(scores - scores.max())
    found: Floats = weights / weights.sum()
    return found


def penalised(params: SamplingParams) -> Floats:
    scores = LOGITS.copy()
    for token in range(VOCABULARY):
        if token in PROMPT + OUTPUT:
            factor = params.repetition_penalty
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        count = OUTPUT.count(token)
        scores[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return scores


def exact(params: SamplingParams, *, suppressed: list[int]) -> Floats:
    """The distribution, step by step in float64, as the parameters' definitions have it."""
    scores = penalised(params)
    for token, bias in (params.logit_bias or {}).items():
        # A bias comes before penalties; where both meet a token the formula would differ, so no case has both.
        scores[token] += bias
    if params.allowed_token_ids is not None:
        scores[[token for token in range(VOCABULARY) if token not in params.allowed_token_ids]] = -math.inf
    scores[suppressed] = -math.inf
    probs = softmax(scores / params.temperature)
    probs[probs < params.min_p * probs.max()] = 0.0
    if params.top_k:
        probs[probs < np.sort(probs)[::-1][params.top_k - 1]] = 0.0
    probs /= probs.sum()
    ordered = np.sort(probs)[::-1]
    kept = int((np.cumsum(ordered) - ordered < params.top_p).sum())
    probs[probs < ordered[kept - 1]] = 0.0
    found: Floats = probs / probs.sum()
    return found


def p_value(counts: Floats, probs: Floats) -> float:
    """Of Pearson's chi-square; rare tokens are put together, so that every cell expects 20 draws or more."""
    common = probs >= LEAST_PROBABILITY
    cells = np.append(probs[common], probs[~common].sum())
    found = np.append(counts[common], counts[~common].sum())
    if cells[-1] < LEAST_PROBABILITY:
        assert found[-1] <= 4 * DRAWS * LEAST_PROBABILITY
        cells, found = cells[:-1] / cells[:-1].sum(), found[:-1]
    expected = cells * found.sum()
    statistic = float(((found - expected) ** 2 / expected).sum())
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 2.5},
    "top-p": {"top_p": 0.8},
    "narrow top-p": {"top_p": 0.35, "temperature": 1.5},
    "top-k": {"top_k": 7},
    "min-p": {"min_p": 0.12},
    "presence": {"presence_penalty": 1.3},
    "negative presence": {"presence_penalty": -1.0},
    "frequency": {"frequency_penalty": 0.6},
    "repetition": {"repetition_penalty": 1.7},
    "weak repetition": {"repetition_penalty": 0.8},
    "bias": {"logit_bias": {3: 2.0, 50: -3.0, 11: 1.0}},
    "allowed": {"allowed_token_ids": [1, 2, 3, 20, 21, 22, 59]},
    "everything": {
        "temperature": 1.4,
        "top_p": 0.9,
        "top_k": 25,
        "min_p": 0.03,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_exact_distribution(name: str) -> None:
    params = SamplingParams(**CASES[name])
    suppressed = [0, 17] if name == "everything" else []
    probs = exact(params, suppressed=suppressed)
    counts = np.bincount(draw(params, suppressed=suppressed), minlength=VOCABULARY).astype(np.float64)
    assert counts.sum() == DRAWS
    assert counts[probs == 0.0].sum() == 0
    assert p_value(counts, probs) > 1e-3


def test_the_cases_differ_so_much_that_one_would_fail_as_the_other() -> None:
    plain = np.bincount(draw(SamplingParams(), suppressed=[]), minlength=VOCABULARY).astype(np.float64)
    for name, values in CASES.items():
        probs = exact(SamplingParams(**values), suppressed=[])
        if name != "plain" and (probs > 0).all():
            assert p_value(plain, probs) < 1e-9, name
