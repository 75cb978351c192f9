"""Attention over packed sequences against attention written out in float64, causal and both ways."""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.kernel_builds import OTHER_PROCESSORS, build
from headrace_engine.runner.attention import native
from headrace_engine.runner.attention.varlen import FlashVarlen, NativeVarlen, TorchVarlen

KERNELS = ("engine/headrace_engine/runner/attention", "engine/headrace_engine/runner/native")


@dataclass(frozen=True)
class Problem:
    lengths: tuple[int, ...]
    kv_heads: int = 1
    group: int = 1
    k_dim: int = 32
    v_dim: int = 32
    both_ways: bool = True
    window: int | None = None
    softcap: float | None = None
    seed: int = 0

    def tensors(self, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(self.seed)
        shapes = ((self.kv_heads * self.group, self.k_dim), (self.kv_heads, self.k_dim), (self.kv_heads, self.v_dim))
        return [torch.randn(sum(self.lengths), *shape, generator=draw).to(dtype) for shape in shapes]

    def compute(self, attention: Any, tensors: list[torch.Tensor]) -> torch.Tensor:
        attention.begin(self.lengths)
        found: torch.Tensor = attention.forward(
            *tensors, both_ways=self.both_ways, window=self.window, scale=self.k_dim**-0.5, softcap=self.softcap
        )
        return found

    def expected(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        outputs = []
        for first, end in pairwise([sum(self.lengths[:n]) for n in range(len(self.lengths) + 1)]):
            q, k, v = (t[first:end].double().transpose(0, 1) for t in tensors)
            scores = q @ k.repeat_interleave(self.group, 0).transpose(1, 2) * self.k_dim**-0.5
            if self.softcap is not None:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            i, j = torch.meshgrid(torch.arange(end - first), torch.arange(end - first), indexing="ij")
            seen = (j <= i) | self.both_ways
            if self.window is not None:
                seen &= (i - j).abs() < self.window
            scores[:, ~seen] = -torch.inf
            outputs.append((scores.softmax(-1) @ v.repeat_interleave(self.group, 0)).transpose(0, 1))
        return torch.cat(outputs)


problems = st.builds(
    Problem,
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=5).map(tuple),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    k_dim=st.sampled_from([8, 21, 32, 64]),
    v_dim=st.sampled_from([15, 16, 32, 72]),
    both_ways=st.booleans(),
    window=st.none() | st.integers(1, 60),
    softcap=st.none() | st.just(20.0),
    seed=st.integers(0, 1000),
)
LONG = Problem((150, 1, 31, 33, 300), kv_heads=2, group=3, k_dim=64, v_dim=40)
WINDOWS = replace(LONG, window=9)
both_kernels = pytest.mark.parametrize("kernel", [TorchVarlen, NativeVarlen], ids=["torch", "native"])


@both_kernels
@example(Problem((1,)))
@example(Problem((16, 17, 15), window=1))
@example(LONG)
@example(WINDOWS)
@given(problems)
@settings(max_examples=25, deadline=None)
def test_each_token_sees_its_own_sequence_within_the_window(kernel: Any, problem: Problem) -> None:
    tensors = problem.tensors()
    found = problem.compute(kernel(), tensors)
    torch.testing.assert_close(found.double(), problem.expected(tensors), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("problem", [LONG, WINDOWS, replace(LONG, both_ways=False)], ids=["long", "window", "causal"])
def test_bfloat16_is_right_to_the_rounding_of_the_output(problem: Problem) -> None:
    tensors = problem.tensors(torch.bfloat16)
    found = problem.compute(NativeVarlen(), tensors)
    tolerance = 8e-3 if native.library().headrace_attention_has_pairs() else 2e-3
    torch.testing.assert_close(found.double(), problem.expected(tensors), atol=tolerance, rtol=2**-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("problem", [LONG, WINDOWS], ids=["long", "window"])
def test_a_sequence_has_the_same_bytes_alone_and_among_others(problem: Problem, dtype: torch.dtype) -> None:
    tensors, kernel = problem.tensors(dtype), NativeVarlen()
    together = problem.compute(kernel, tensors)
    first = 0
    for length in problem.lengths:
        alone = replace(problem, lengths=(length,)).compute(kernel, [t[first : first + length] for t in tensors])
        assert torch.equal(alone, together[first : first + length])
        first += length


@both_kernels
def test_a_sequence_that_is_not_finite_reaches_no_other(kernel: Any) -> None:
    tensors, attention = LONG.tensors(), kernel()
    before = LONG.compute(attention, tensors)
    spoiled = [t.clone() for t in tensors]
    for t in spoiled:
        t[151:182] = torch.nan
    found = LONG.compute(attention, spoiled)
    assert found[151:182].isnan().all()
    assert torch.equal(found[:151], before[:151])
    assert torch.equal(found[182:], before[182:])
    assert torch.equal(LONG.compute(attention, tensors), before)  # nothing is left in the memory


@pytest.mark.rotated(*KERNELS, "tests/engine/kernel_builds.py")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86-64")
@pytest.mark.parametrize("without", OTHER_PROCESSORS)
def test_builds_for_other_processors_compute_the_same(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = native.declared(build("paged_attention.c", "attention", without))
    monkeypatch.setattr(native, "library", lambda: other)
    for problem in (LONG, WINDOWS, Problem((33, 40), group=3, k_dim=21, v_dim=40, window=9, softcap=20.0)):
        for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 8e-3)):
            tensors = problem.tensors(dtype)
            found = problem.compute(NativeVarlen(), tensors)
            torch.testing.assert_close(found.double(), problem.expected(tensors), atol=tolerance, rtol=2**-7)


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    starts_of_keys: torch.Tensor,
    longest: int,
    longest_key: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """What the documentation of torch's varlen_attn says, whose kernel needs a GPU."""
    assert starts.dtype == starts_of_keys.dtype == torch.int32
    assert longest == longest_key == int(starts.diff().max())
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert query.shape[-1] % 8 == 0
    assert query.shape[-1] <= 256
    before, after = window_size
    outputs = []
    for first, end in pairwise(starts.tolist()):
        q, k, v = (t[first:end].double().transpose(0, 1) for t in (query, key, value))
        group = q.shape[0] // k.shape[0]
        away = torch.arange(end - first) - torch.arange(end - first)[:, None]
        hidden = (away > after) & (after >= 0) | (-away > before) & (before >= 0)
        scores = (q @ k.repeat_interleave(group, 0).transpose(1, 2) * scale).masked_fill(hidden, -torch.inf)
        outputs.append((scores.softmax(-1) @ v.repeat_interleave(group, 0)).transpose(0, 1))
    return torch.cat(outputs).to(query.dtype)


@given(problem=problems)
def test_a_gpu_is_asked_for_the_attention_of_the_layer(problem: Problem) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.nn.attention.varlen.varlen_attn", flash_attention)
        attention = FlashVarlen()
    tensors = problem.tensors(torch.bfloat16)
    found = problem.compute(attention, tensors)
    torch.testing.assert_close(found.double(), problem.expected(tensors), rtol=0.02, atol=0.02)
