"""What the graph draws is what the host's sampler draws, or the graph says that it cannot know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.runner.sampling.graph_sampling import CANDIDATES, draw, needs_host, sampling_values_of
from headrace_engine.runner.sampling.sampler import SamplingRow, sample

pytestmark = pytest.mark.rotated_file("engine/headrace_engine/runner/static")

VOCABULARY = 1000


def row(u: float, **params: Any) -> SamplingRow:
    return SamplingRow(
        params=SamplingParams(**params), u=u, prompt_token_ids=(), output_token_ids=(), suppressed_token_ids=()
    )


def in_graph(logits: torch.Tensor, rows: list[SamplingRow]) -> tuple[list[int], list[int]]:
    pairs = [sampling_values_of(one, logits.shape[-1]) for one in rows]
    sampling_values = torch.stack([torch.from_numpy(sampling_values) for sampling_values, _ in pairs])
    drawn = draw(logits, sampling_values, torch.tensor([top_k for _, top_k in pairs], dtype=torch.int32))
    return drawn.tokens.tolist(), drawn.is_exact.tolist()


@given(
    seed=st.integers(0, 2**31),
    spread=st.sampled_from([0.01, 1.0, 3.0, 8.0]),
    size=st.sampled_from([5, CANDIDATES, CANDIDATES + 1, VOCABULARY]),
    params=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
            "top_k": st.sampled_from([0, 1, 5, 200, CANDIDATES, CANDIDATES + 1, 5000]),
            "top_p": st.sampled_from([0.01, 0.5, 0.95, 1.0]),
            "min_p": st.sampled_from([0.0, 0.001, 0.2, 1.0]),
        }
    ),
)
@settings(max_examples=150, deadline=None)
def test_the_graph_draws_the_hosts_token_wherever_it_says_that_it_knows(
    seed: int, spread: float, size: int, params: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, size, generator=generator) * spread
    logits[3] = logits[3].round()  # ties
    us = torch.rand(6, generator=generator).tolist()
    rows = [row(u, **params) for u in us]
    expected, _ = sample(logits, rows)
    tokens, exact = in_graph(logits, rows)
    assert [token for token, known in zip(tokens, exact, strict=True) if known] == [
        token for token, known in zip(expected, exact, strict=True) if known
    ]
    if params["temperature"] == 0 or size <= CANDIDATES:
        assert all(exact)


@pytest.mark.parametrize(
    ("params", "known"),
    [
        ({"temperature": 0.0}, True),
        ({"top_k": 50}, True),
        ({"top_k": CANDIDATES - 1, "top_p": 0.9}, True),
        ({"min_p": 0.5}, True),
        ({}, False),  # all 1000 tokens may be drawn
        ({"top_k": CANDIDATES + 1}, False),
        ({"top_p": 0.99}, False),
        ({"min_p": 1e-6}, False),
    ],
)
def test_a_distribution_is_never_cut_unasked(params: dict[str, Any], known: bool) -> None:
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1))
    assert in_graph(logits, [row(0.5, **params)])[1] == [int(known)]


def test_a_narrow_top_p_is_known_without_top_k() -> None:
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 5
    assert in_graph(logits, [row(0.5, top_p=0.9)])[1] == [1]


def test_u_at_its_ends_stays_within_the_kept_tokens() -> None:
    logits = torch.arange(VOCABULARY, dtype=torch.float32)[None].flip(-1).repeat(2, 1)
    rows = [row(0.0, top_k=3), row(1 - 2**-53, top_k=3)]
    assert in_graph(logits, rows) == ([0, 2], [1, 1])


@pytest.mark.parametrize(
    ("params", "host"),
    [
        (
            {"temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 3, "stop": ["x"], "max_tokens": 9},
            False,
        ),
        ({"logprobs": 0}, True),
        ({"presence_penalty": 0.1}, True),
        ({"repetition_penalty": 1.1}, True),
    ],
)
def test_what_the_graph_does_not_compute_goes_to_the_host(params: dict[str, Any], host: bool) -> None:
    assert needs_host(row(0.5, **params)) is host


def test_suppressed_tokens_go_to_the_host() -> None:
    suppressed = row(0.5)
    suppressed.suppressed_token_ids = [2]
    assert needs_host(suppressed)
