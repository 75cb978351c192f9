"""The passes between matrix products on a GPU: Triton's kernels, and plain torch, against float64 and transformers.

Without a GPU the kernels run in Triton's interpreter, and are compiled for Hopper besides, which needs no GPU either.
HEADRACE_TRITON_EXAMPLES asks for more examples.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from headrace_engine.runner.elementwise import torch_ops, triton_ops
from headrace_engine.runner.elementwise.ops import Activation, ElementwiseOps

pytestmark = pytest.mark.rotated_file("engine/headrace_engine/runner/elementwise", "engine/headrace_engine/runner/cuda")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXAMPLES = int(os.environ.get("HEADRACE_TRITON_EXAMPLES", "15"))
several = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: make test-triton"
)
forms = pytest.mark.parametrize(
    "passes", [pytest.param(triton_ops, marks=needs_triton), torch_ops], ids=["triton", "torch"]
)


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32, spread: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype).to(DEVICE)


class Exact:
    """The passes in float64, rounded to the type of the data where transformers rounds."""

    def __init__(self, passes: ElementwiseOps, dtype: torch.dtype) -> None:
        # Triton's interpreter cuts off where a GPU rounds to the nearest bfloat16.
        self._cuts = passes is triton_ops and DEVICE == "cpu"
        self._dtype = dtype

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        if self._dtype is torch.float32:
            return x
        if self._cuts:
            return (x.float().view(torch.int32) & ~0xFFFF).view(torch.float32).double()
        return x.to(self._dtype).double()

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return self.rounded(self.rounded(x * scale) * weight.double())

    def rotation(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        crossed = torch.cat((-second, first), dim=-1)
        return self.rounded(self.rounded(x * cosine.double()) + self.rounded(crossed * sine.double()))

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        gate, up = gate_up.double().chunk(2, dim=-1)
        gelu = nn.functional.gelu(gate, approximate="tanh")
        return self.rounded(self.rounded(nn.functional.silu(gate) if activation is Activation.SILU else gelu) * up)


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    """float32 to its rounding; bfloat16 to the bit, but for sums so close to a half that float32 and 64 differ."""
    assert not found.isnan().any()
    if found.dtype is torch.float32:
        torch.testing.assert_close(found.double(), expected, rtol=3e-6, atol=3e-6)
    else:
        assert (found.double() != expected).sum() <= 1 + found.numel() // 50
        torch.testing.assert_close(found.double(), expected, rtol=2**-6, atol=2**-6)


@forms
@example(rows=2, features=4096, seed=0, dtype=torch.bfloat16, adds=True)
@example(rows=3, features=577, seed=0, dtype=torch.float32, adds=True)
@given(
    rows=st.integers(1, 5), features=st.integers(1, 300), seed=st.integers(0, 1000), dtype=dtypes, adds=st.booleans()
)
@several
def test_the_norm_is_that_of_the_sum_which_stays_behind(
    passes: ElementwiseOps, rows: int, features: int, seed: int, dtype: torch.dtype, adds: bool
) -> None:
    hidden, delta = (random(seed + own, rows, features, dtype=dtype, spread=1.0 + own) for own in range(2))
    weight, exact = random(seed + 2, features), Exact(passes, dtype)
    summed = hidden.double()
    if adds:
        summed = exact.rounded(hidden.double() + delta.double())
    out = passes.add_rms_norm(hidden, delta if adds else None, weight, 1e-5)
    check(hidden, summed)
    check(out, exact.norm(hidden.double(), weight, 1e-5))
    # torch adds in every form, so that the sum is rounded to the nearest value
    expected = (hidden.double() + exact.norm(delta.double(), weight, 1e-5)).to(dtype).double()
    passes.add_normed(hidden, delta, weight, 1e-5)
    check(hidden, expected)


@forms
@example(q_heads=32, k_heads=8, head_dim=128, turned=1.0, norms=True, tokens=2, seed=1, dtype=torch.bfloat16)
@example(q_heads=30, k_heads=5, head_dim=80, turned=0.4, norms=True, tokens=3, seed=1, dtype=torch.float32)
@example(q_heads=3, k_heads=1, head_dim=64, turned=0.0, norms=True, tokens=2, seed=1, dtype=torch.float32)
@given(
    q_heads=st.integers(1, 9),
    k_heads=st.integers(1, 3),
    head_dim=st.sampled_from([8, 18, 24, 64, 80]),
    turned=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    norms=st.booleans(),
    tokens=st.integers(1, 4),
    seed=st.integers(0, 1000),
    dtype=dtypes,
)
@several
def test_queries_and_keys_are_normalised_and_turned_and_values_left_alone(
    passes: ElementwiseOps,
    q_heads: int,
    k_heads: int,
    head_dim: int,
    turned: float,
    norms: bool,
    tokens: int,
    seed: int,
    dtype: torch.dtype,
) -> None:
    rotary_dim = int(head_dim * turned) // 2 * 2
    num_heads, exact = q_heads + k_heads, Exact(passes, dtype)
    qkv = random(seed, tokens, (num_heads + k_heads) * head_dim, dtype=dtype, spread=2.0)
    weights = [random(seed + own, head_dim) if norms else None for own in (1, 2)]
    # unlike those of transformers, the halves differ: each must be read where it lies
    angles = random(seed + 3, tokens, rotary_dim, spread=3.0)
    cosine, sine = (angles.cos().to(dtype), angles.sin().to(dtype)) if rotary_dim else (None, None)
    values = qkv[:, num_heads * head_dim :].clone()
    expected = qkv.double().view(tokens, -1, head_dim)[:, :num_heads].clone()
    for part, weight in zip((expected[:, :q_heads], expected[:, q_heads:]), weights, strict=True):
        if weight is not None:
            part.copy_(exact.norm(part, weight, 1e-6))
    if cosine is not None and sine is not None:
        front = expected[..., :rotary_dim]
        front.copy_(exact.rotation(front, cosine[:, None], sine[:, None]))
    passes.norm_rope(
        qkv, q_heads, k_heads, head_dim, q_weight=weights[0], k_weight=weights[1], eps=1e-6, cosine=cosine, sine=sine
    )
    check(qkv[:, : num_heads * head_dim], expected.reshape(tokens, -1))
    assert torch.equal(qkv[:, num_heads * head_dim :], values)


@forms
@example(rows=2, features=1025, seed=0, dtype=torch.float32)
@example(rows=2, features=2300, seed=0, dtype=torch.bfloat16)
@given(rows=st.integers(1, 4), features=st.integers(1, 300), seed=st.integers(0, 1000), dtype=dtypes)
@several
def test_the_gate_opens_for_its_own_feature_far_into_both_tails(
    passes: ElementwiseOps, rows: int, features: int, seed: int, dtype: torch.dtype
) -> None:
    gate_up = random(seed, rows, 2 * features, dtype=dtype, spread=3.0)
    gate_up[0, 0], gate_up[-1, features - 1] = -200.0, 200.0
    check(passes.gate(gate_up, Activation.SILU), Exact(passes, dtype).gate(gate_up, Activation.SILU))
    # The tanh of float32 loses the small side of GELU.
    found = passes.gate(gate_up, Activation.GELU_TANH).double()
    expected = Exact(passes, dtype).gate(gate_up, Activation.GELU_TANH).double()
    torch.testing.assert_close(found, expected, rtol=2**-6 if dtype is torch.bfloat16 else 1e-5, atol=1e-4)


@forms
def test_a_value_that_is_no_number_stays_in_its_row(passes: ElementwiseOps) -> None:
    hidden, qkv, gate_up = (random(own, 4, 48) for own in range(3))
    for each in (hidden, qkv, gate_up):
        each[1, 3] = float("nan")
    ones = torch.ones(48, device=DEVICE)
    passes.norm_rope(qkv, 2, 1, 12, q_weight=ones[:12], k_weight=ones[:12], eps=1e-6, cosine=None, sine=None)
    for out in (passes.add_rms_norm(hidden, None, ones, 1e-6), qkv, passes.gate(gate_up, Activation.GELU_TANH)):
        assert out.isnan().any(dim=-1).tolist() == [False, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_plain_torch_gives_the_bits_of_transformers_modules(dtype: torch.dtype) -> None:
    hidden, delta, weight = random(0, 7, 96, dtype=dtype), random(1, 7, 96, dtype=dtype), random(2, 96, dtype=dtype)
    norm: Any = LlamaRMSNorm(96, eps=1e-5).to(DEVICE, dtype)
    norm.weight.data = weight
    assert torch.equal(torch_ops.add_rms_norm(hidden.clone(), delta, weight, 1e-5), norm(hidden + delta))

    qkv = random(3, 7, 8 * 16, dtype=dtype)
    angles = random(4, 7, 8).repeat(1, 2)
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    heads = qkv.clone().view(1, 7, 8, 16).transpose(1, 2)
    expected = apply_rotary_pos_emb(heads[:, :4], heads[:, 4:6], cosine[None], sine[None])
    nothing: dict[str, Any] = {"q_weight": None, "k_weight": None, "eps": 0.0}
    torch_ops.norm_rope(qkv, 4, 2, 16, **nothing, cosine=cosine, sine=sine)
    turned = qkv.view(1, 7, 8, 16).transpose(1, 2)
    assert torch.equal(turned[:, :6], torch.cat(expected, dim=1))

    # Of whole vectors: what is left of a row torch computes one by one, with another last bit where it has AVX-512.
    gate, up = random(5, 7, 64, dtype=dtype), random(6, 7, 64, dtype=dtype)
    assert torch.equal(torch_ops.gate(torch.cat([gate, up], dim=1), Activation.SILU), nn.functional.silu(gate) * up)


@needs_triton
@pytest.mark.parametrize(
    ("q_weight", "k_weight"), [(torch.ones(16), None), (None, torch.ones(16)), (torch.ones(64), torch.ones(32))]
)
def test_norms_of_another_kind_than_one_a_head_are_refused(
    q_weight: torch.Tensor | None, k_weight: torch.Tensor | None
) -> None:
    with pytest.raises(ValueError, match="queries and keys need norms of the size of a head, or none"):
        triton_ops.norm_rope(
            random(0, 3, 8 * 16), 4, 2, 16, q_weight=q_weight, k_weight=k_weight, eps=1e-6, cosine=None, sine=None
        )


@needs_triton
def test_the_kernels_compile_for_hopper() -> None:
    """Triton's compiler and ptxas need no GPU; they see errors that the interpreter does not."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "engine.compile_for_hopper", "elementwise"]
    tests = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=tests, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    sizes = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, _ in sizes] == [
        "add_rms_norm_kernel",
        "add_rms_norm_kernel",
        "norm_rope_kernel",
        "norm_rope_kernel",
        "gate_kernel",
    ]
    # they hold their row in registers: what is shared is for sums
    assert max(int(size) for _, size in sizes) <= 4 << 10
