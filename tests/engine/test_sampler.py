"""The sampler against formulas written out token by token, and its randomness against known numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.runner.sampling.rng import uniform
from headrace_engine.runner.sampling.sampler import SamplingRow, sample


def row(
    u: float = 0.5,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    suppressed: Sequence[int] = (),
    **params: Any,
) -> SamplingRow:
    return SamplingRow(
        params=SamplingParams(**params),
        u=u,
        prompt_token_ids=prompt,
        output_token_ids=output,
        suppressed_token_ids=suppressed,
    )


def naive_scores(logits: list[float], row: SamplingRow) -> list[float]:
    """The logits after penalties; a suppressed token has none."""
    params, scores = row.params, list(logits)
    for token in range(len(scores)):
        if token in row.prompt_token_ids or token in row.output_token_ids:
            factor = params.repetition_penalty
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        count = list(row.output_token_ids).count(token)
        scores[token] -= count * params.frequency_penalty + (count > 0) * params.presence_penalty
        if token in row.suppressed_token_ids:
            scores[token] = -math.inf
    return scores


def naive_weights(logits: list[float], row: SamplingRow) -> list[float]:
    """Each token's share after penalties, temperature, min-p, top-k and top-p, in this order."""
    params, scores = row.params, naive_scores(logits, row)
    most = max(scores)
    weights = [math.exp((score - most) / params.temperature) for score in scores]
    weights = [w if w >= params.min_p else 0.0 for w in weights]  # the largest weight is 1
    if params.top_k:
        least = sorted(weights, reverse=True)[: params.top_k][-1]
        weights = [w if w >= least else 0.0 for w in weights]
    total = sum(weights)
    kept, gathered = [], 0.0
    for weight in sorted(weights, reverse=True):
        if gathered < params.top_p * total:
            kept.append(weight)
            gathered += weight
    weights = [w if w >= kept[-1] else 0.0 for w in weights]
    return [w / sum(weights) for w in weights]


def tokens_at(logits: list[float], template: SamplingRow, draws: Sequence[float]) -> list[int]:
    """The token of each draw, all in one batch."""
    rows = [
        SamplingRow(
            params=template.params,
            u=u,
            prompt_token_ids=template.prompt_token_ids,
            output_token_ids=template.output_token_ids,
            suppressed_token_ids=template.suppressed_token_ids,
        )
        for u in draws
    ]
    return sample(torch.tensor([logits] * len(rows)), rows)[0]


LOGITS = st.lists(st.integers(-60, 60).map(lambda n: n / 10), min_size=8, max_size=8)
TOKENS = st.lists(st.integers(0, 7), max_size=6)
ROWS = st.builds(
    row,
    u=st.floats(0, 1, exclude_max=True),
    prompt=TOKENS,
    output=TOKENS,
    suppressed=st.lists(st.integers(0, 7), max_size=3, unique=True),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 7, 8, 100]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.07]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.3, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.3, -1.1]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.6]),
    logprobs=st.sampled_from([None, 0, 3]),
)
GRID = [(i + 0.5) / 64 for i in range(64)]


@given(logits=LOGITS, template=ROWS.filter(lambda row: row.params.temperature > 0))
@settings(max_examples=150, deadline=None)
def test_each_draw_is_the_inverse_of_the_naive_distribution(logits: list[float], template: SamplingRow) -> None:
    weights = naive_weights(logits, template)
    bounds = np.cumsum(weights)
    # Rounding may put a token on either side of a cut that float32 and float64 see differently.
    for e in (1e-5, -1e-5):
        perturbed = naive_weights([x + e * (i % 3 - 1) for i, x in enumerate(logits)], template)
        assume([w > 0 for w in perturbed] == [w > 0 for w in weights])
    for u, token in zip(GRID, tokens_at(logits, template, GRID), strict=True):
        assert weights[token] > 0
        if min(abs(bounds - u)) > 1e-5:
            assert token == int(np.argmax(bounds > u))


@example(logits=[1.0, 2.0, 2.0, 0.0, 2.0, 0.0, 0.0, 0.0], template=row(temperature=0.0))
@example(logits=[1.0, 2.0, 2.0, 0.0, 2.0, 0.0, 0.0, 0.0], template=row(temperature=0.0, output=[1], suppressed=[2]))
@given(logits=LOGITS, template=ROWS.filter(lambda row: row.params.temperature == 0))
@settings(max_examples=150, deadline=None)
def test_greedy_takes_the_first_of_the_greatest_scores(logits: list[float], template: SamplingRow) -> None:
    scores = naive_scores(logits, template)
    best = scores.index(max(scores))
    # Penalties can make two logits equal but for the rounding: either may be the greatest then.
    for token, score in enumerate(scores):
        assume(score < scores[best] - 1e-5 or (logits[token] == logits[best] and score == scores[best]))
    assert set(tokens_at(logits, template, GRID)) == {best}


@given(logits=st.lists(LOGITS, min_size=2, max_size=6), rows=st.lists(ROWS, min_size=6, max_size=6), data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_row_gets_the_same_token_and_logprobs_whatever_its_batch_mates(
    logits: list[list[float]], rows: list[SamplingRow], data: st.DataObject
) -> None:
    rows = rows[: len(logits)]
    together, logprobs = sample(torch.tensor(logits), rows)
    order = data.draw(st.permutations(range(len(rows))))
    shuffled, _ = sample(torch.tensor([logits[i] for i in order]), [rows[i] for i in order])
    assert shuffled == [together[i] for i in order]
    for index, own in enumerate(rows):
        alone, own_logprobs = sample(torch.tensor([logits[index]]), [own])
        assert alone == [together[index]]
        assert own_logprobs.get(0) == logprobs.get(index)


def test_a_row_that_keeps_a_long_tail_does_not_change_its_batch_mates() -> None:
    flat, peaked = torch.zeros(5000), torch.linspace(0, 12, 5000)
    rows = [row(0.999, top_p=0.99), row(0.37, top_p=0.6)]
    together, _ = sample(torch.stack([flat, peaked]), rows)
    assert together == [sample(t[None], [r])[0][0] for t, r in zip((flat, peaked), rows, strict=True)]
    assert together[0] == int(0.999 * 5000)  # equal tokens are tied, so all of them stay


def test_greedy_takes_the_largest_logit_and_draws_nothing() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0], [5.0, 1.0, 4.0]])
    assert sample(logits, [row(0.99, temperature=0), row(0.99, temperature=0, top_k=2)])[0] == [1, 0]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 3}, {0, 1, 2, 3}),  # tokens 2 and 3 are tied
        ({"top_p": 0.5}, {0}),  # exactly half is enough
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 0.76}, {0, 1, 2, 3}),
        ({"min_p": 0.5}, {0, 1}),
        ({"min_p": 0.51}, {0}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 2, "top_p": 0.6}, {0}),  # top-p is of what top-k left: 2/3 and 1/3
        ({"top_p": 1e-9}, {0}),
    ],
)
def test_exactly_the_wanted_tokens_can_be_drawn(params: dict[str, Any], kept: set[int]) -> None:
    logits = [math.log(p) for p in (0.5, 0.25, 0.125, 0.125)]
    assert set(tokens_at(logits, row(**params), [i / 512 for i in range(512)])) == kept


def test_a_suppressed_token_is_never_drawn_even_when_it_is_the_likeliest() -> None:
    logits = torch.tensor([[9.0, 1.0, 0.0]] * 3)
    rows = [row(suppressed=[0], temperature=0), row(0.99, suppressed=[0, 1]), row(0.0, suppressed=[0])]
    assert sample(logits, rows)[0] == [1, 2, 1]


@pytest.mark.parametrize("temperature", [1e300, 10**30])
def test_a_temperature_beyond_float32_is_uniform_and_still_suppresses(temperature: float) -> None:
    logits = [9.0, 1.0, 0.0]
    assert set(tokens_at(logits, row(temperature=temperature, suppressed=[0]), GRID)) == {1, 2}


@pytest.mark.parametrize("penalty", [1e300, 10**30, 1e-300])
def test_a_repetition_penalty_beyond_float32_still_draws_what_may_be_drawn(penalty: float) -> None:
    logits = [3.0, 0.0, -2.0, -1.0]
    seen = row(repetition_penalty=penalty, prompt=[0, 1, 2, 3], suppressed=[0])
    assert set(tokens_at(logits, seen, GRID)) == ({1} if penalty > 1 else {1, 2, 3})


def test_logits_are_not_changed() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    before = logits.clone()
    sample(logits, [row(top_k=1, min_p=0.5, top_p=0.5, output=[2], presence_penalty=1.0, suppressed=[0])])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_draw_tokens_that_have_a_probability(u: float) -> None:
    logits = torch.tensor([[-math.inf, 1.0, 2.0, -math.inf]] * 2)
    assert sample(logits, [row(u), row(u, top_k=2)])[0] == ([1, 1] if u == 0 else [2, 2])


def test_draws_follow_the_distribution() -> None:
    probs = np.array([0.4, 0.3, 0.2, 0.07, 0.03])
    draws = uniform([1234] * 20_000, range(20_000))
    tokens = tokens_at(np.log(probs).tolist(), row(), [float(u) for u in draws])
    counts = np.bincount(tokens, minlength=5)
    chi_square = float((((counts - 20_000 * probs) ** 2) / (20_000 * probs)).sum())
    assert chi_square < 18.5  # 4 degrees of freedom: exceeded once in 1000 by chance, but the draws are fixed


def test_logprobs_are_those_of_the_raw_logits_sampled_token_first() -> None:
    logits = torch.tensor([[1.0, 4.0, 3.0, 2.0]])
    raw = torch.log_softmax(logits[0], dim=-1).tolist()
    one = row(temperature=0, logprobs=2, output=[1], presence_penalty=2.0, suppressed=[2])
    token_ids, logprobs = sample(logits, [one])
    assert token_ids == [1], "the first of two whose scores are equal"
    (entry,) = logprobs.values()
    sampled = token_ids[0]
    assert entry[0] == (sampled, pytest.approx(raw[sampled]), 1 + sum(x > raw[sampled] for x in raw))
    assert [e[0] for e in entry[1:]] == [token for token in (1, 2) if token != sampled]
    assert [e[2] for e in entry[1:]] == [rank for token, rank in ((1, 1), (2, 2)) if token != sampled]


def test_logprobs_zero_reports_the_sampled_token_alone() -> None:
    _, logprobs = sample(torch.tensor([[1.0, 4.0], [1.0, 4.0]]), [row(temperature=0, logprobs=0), row(temperature=0)])
    assert {index: [e[0] for e in entry] for index, entry in logprobs.items()} == {0: [1]}


def test_logprob_token_ids_are_reported_instead_of_the_likeliest_with_their_ranks_in_the_raw_logits() -> None:
    logits = torch.tensor([[1.0, 4.0, 3.0, 2.0, 4.0]])
    raw = torch.log_softmax(logits[0], dim=-1).tolist()
    _, logprobs = sample(logits, [row(temperature=0, logprob_token_ids=[0, 2, 1, 0], suppressed=[4])])
    assert logprobs[0] == [(1, pytest.approx(raw[1]), 1), (0, pytest.approx(raw[0]), 5), (2, pytest.approx(raw[2]), 3)]


KNOWN_DRAWS = [0.6524484863740322, 0.7012121095215252, 0.36818951565166946, 0.7238582745899125, 0.39854775898749717]

# -- randomness ----------------------------------------------------------------------------------------------------


def splitmix(seed: int, position: int) -> float:
    """The generator in plain integers."""

    def finalise(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    return (finalise((finalise((seed + golden) % 2**64) + (position + 1) * golden) % 2**64) >> 11) * 2.0**-53


def test_known_draws_never_change() -> None:
    # A request that resumes on a newer version must draw on as it began: these numbers are part of the wire format.
    draws = uniform([0, 0, 1, -1, 2**63 - 1], [0, 1, 0, 7, 10**6])
    assert draws.tolist() == KNOWN_DRAWS


@given(seed=st.integers(-(2**63), 2**63 - 1), position=st.integers(0, 2**40))
def test_a_draw_is_the_generator_written_in_plain_integers(seed: int, position: int) -> None:
    (found,) = uniform([seed], [position])
    assert found == splitmix(seed % 2**64, position)
    assert 0 <= found < 1


def test_draws_are_uniform_along_positions_and_along_seeds() -> None:
    for draws in (uniform([99] * 40_000, range(40_000)), uniform(range(40_000), [3] * 40_000)):
        counts = np.histogram(draws, bins=50, range=(0, 1))[0]
        assert float(((counts - 800) ** 2 / 800).sum()) < 86  # 49 degrees of freedom, one in a thousand
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.02


def test_no_draws_for_no_requests() -> None:
    assert uniform([], []).shape == (0,)


@pytest.mark.parametrize(
    "values",
    [
        [[1.0, 3.0, 3.0, -7.0], [0.5, 0.25, 2.0, 1.0]],
        [[-3.0, -1.0, -1.0, -2.0], [1.0, 2.0, 0.0, 0.0]],  # nothing above zero in one row
        [[-0.0, 0.0, -1.0, 0.0], [float("-inf"), float("-inf"), -5.0, float("-inf")]],
        [[1.0, float("inf"), 2.0, float("-inf")], [1e-39, 3e38, -3e38, 1e-30]],
    ],
)
def test_the_first_largest_of_bfloat16_logits_is_that_of_the_same_numbers_in_float32(values: list[list[float]]) -> None:
    logits = torch.tensor(values, dtype=torch.bfloat16)
    rows = [row(temperature=0.0) for _ in values]
    assert sample(logits, rows)[0] == logits.float().numpy().argmax(axis=-1).tolist()


def test_bfloat16_logits_are_not_changed_by_what_a_row_is_adjusted_with() -> None:
    logits = torch.tensor([[1.0, 5.0, 3.0], [4.0, 2.0, 1.0]], dtype=torch.bfloat16)
    before = logits.clone()
    rows = [row(temperature=0.0, suppressed=[1]), row(temperature=1.0, u=0.99, logprobs=1)]
    tokens, logprobs = sample(logits, rows)
    assert tokens[0] == 2
    assert tokens == sample(logits.float(), rows)[0]
    assert logprobs == sample(logits.float(), rows)[1]
    assert torch.equal(logits, before)
