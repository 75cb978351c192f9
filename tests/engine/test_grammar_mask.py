"""A grammar's mask in the sampler: what it leaves, in which proportions, and that it stays in its row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.runner.sampling.sampler import SamplingRow, sample


def row(mask: bytes | None, u: float = 0.5, **params: Any) -> SamplingRow:
    return SamplingRow(
        params=SamplingParams(**params),
        u=u,
        prompt_token_ids=(),
        output_token_ids=(),
        suppressed_token_ids=(),
        grammar_mask=mask,
    )


def test_a_mask_leaves_its_tokens_and_their_proportions() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0, 9.0, -1.0, 0.5, 0.0, 0.3, 1.0])
    allowed = [1, 3, 8]
    mask = sum(1 << token for token in allowed).to_bytes(4, "little")
    rows = [row(mask, u=(step + 0.5) / 2000, logprobs=0) for step in range(2000)]
    draws, logprobs = sample(logits.expand(2000, -1), rows)
    assert set(draws) == set(allowed)
    for token, weight in zip(allowed, torch.softmax(logits[allowed], dim=-1).tolist(), strict=True):
        assert abs(draws.count(token) / 2000 - weight) < 0.002
    own = float(torch.log_softmax(logits, dim=-1)[draws[0]])
    assert logprobs[0][0][1] == pytest.approx(own), "log-probabilities are the model's own"


def test_a_mask_is_the_business_of_its_own_row() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0], [0.0, 5.0, 1.0]])
    rows = [row(bytes([0b101, 0, 0, 0]), temperature=0), row(None, temperature=0)]
    assert sample(logits, rows)[0] == [2, 1]
    assert logits[0].tolist() == [0.0, 5.0, 1.0]
