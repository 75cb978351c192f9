"""What the device draws is what the host's sampler draws, from the same u."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.runner.cuda.sampling import DeviceSampler, draw_from_all
from headrace_engine.runner.sampling.sampler import SamplingRow, sample

pytestmark = pytest.mark.rotated_file("engine/headrace_engine/runner/cuda")


def row(u: float, **params: Any) -> SamplingRow:
    return SamplingRow(
        params=SamplingParams(**params), u=u, prompt_token_ids=(), output_token_ids=(), suppressed_token_ids=()
    )


parameters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 0, 1, 5, 300]),
        "top_p": st.sampled_from([0.5, 1.0, 1.0]),
        "min_p": st.sampled_from([0.0, 0.001, 0.2, 1.0]),
        "logprobs": st.sampled_from([None, None, 2]),
    }
)


@given(
    seed=st.integers(0, 2**31),
    spread=st.sampled_from([0.01, 1.0, 8.0]),
    size=st.sampled_from([5, 1023, 1024, 2500]),
    params=st.lists(parameters, min_size=1, max_size=6),
)
@settings(max_examples=100, deadline=None, derandomize=True)  # u may fall onto a rounding error, once in years
def test_a_mixed_batch_is_drawn_as_the_host_draws_it(
    seed: int, spread: float, size: int, params: list[dict[str, Any]]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(params) + 2, size, generator=generator) * spread
    rows = [row(float(torch.rand(1, generator=generator)), **own) for own in params]
    sampler = DeviceSampler(len(params) + 2, torch.device("cpu"))
    for _ in range(2):  # its buffers are used again
        assert sampler.sample(logits, rows) == sample(logits[: len(rows)], rows)
    on_device = [index for index, own in enumerate(params) if own["logprobs"] is None]
    own_rows, own_logits = [rows[index] for index in on_device], logits[on_device]
    drawn = [
        sampler.draw_ahead(own_logits, own_rows) for _ in range(2)
    ]  # the first is asked for when both are on their way
    before = [ahead.tokens.tolist() for ahead in drawn]
    for ahead, on_its_way in zip(drawn, before, strict=True):
        token_ids, others = ahead.wait()
        assert token_ids == sample(own_logits, own_rows)[0]
        assert others == {index for index, token_id in enumerate(token_ids) if token_id != on_its_way[index]}


def test_u_at_its_ends_stays_within_the_tokens_that_have_any_weight() -> None:
    logits = torch.full((2, 2500), float("-inf"))
    logits[:, [1500, 7, 2047]] = 0.0
    one, none = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    u = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert draw_from_all(logits, one, none, u).tolist() == [7, 2047]


def test_the_whole_distribution_is_drawn_from() -> None:
    logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(2)).expand(20_000, -1)
    u = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    drawn = draw_from_all(logits.clone(), torch.ones(20_000).double(), torch.zeros(20_000).double(), u)
    counted = torch.bincount(drawn, minlength=3000) / 20_000
    assert (counted - torch.softmax(logits[0], -1)).abs().max() < 1e-4


def test_no_rows_are_no_tokens() -> None:
    assert DeviceSampler(4, torch.device("cpu")).sample(torch.zeros(0, 9), []) == ([], {})
