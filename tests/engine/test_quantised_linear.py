"""Linear layers of a GPU whose weights stay quantised: Triton's kernels against the dequantised weights.

Without a GPU the kernels run in Triton's interpreter, and are compiled for Hopper besides.
HEADRACE_TRITON_EXAMPLES asks for more examples.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headrace_engine.runner.linear.prepared_linear import mergeable
from headrace_engine.runner.linear.quantised_weight import CodeKind
from headrace_engine.runner.linear.triton_quantised_linear import TritonQuantisedLinear, supports
from headrace_engine.runner.weights.float_weight import FloatWeight
from headrace_engine.runner.weights.integer_weight import IntegerWeight

pytestmark = [
    pytest.mark.rotated_file(
        "engine/headrace_engine/runner/linear",
        "engine/headrace_engine/runner/weights",
        "engine/headrace_engine/runner/cuda",
        "tests/engine/compile_for_hopper.py",
    ),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed: make test-triton"),
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXAMPLES = int(os.environ.get("HEADRACE_TRITON_EXAMPLES", "12"))
several = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
kinds = st.sampled_from(CodeKind)


def integers(kind: CodeKind, out: int, inputs: int, group: int, seed: int, order: torch.Tensor | None) -> IntegerWeight:
    draw, bits = torch.Generator().manual_seed(seed), 4 if kind is CodeKind.INT4 else 8
    groups = (inputs // group, out)
    return IntegerWeight(
        bits,
        torch.randint(0, 1 << bits, (inputs, out), generator=draw, dtype=torch.uint8).T,  # as files have them
        (torch.rand(groups, generator=draw) * 0.02 + 0.001).half().T,
        torch.randint(0, 1 << bits, groups, generator=draw, dtype=torch.int16).T,
        order,
    )


def floats(out: int, inputs: int, block: tuple[int, int], seed: int) -> FloatWeight:
    draw = torch.Generator().manual_seed(seed)
    values = (torch.randn(out, inputs, generator=draw) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-out // block[0]), -(-inputs // block[1]), generator=draw) * 0.01 + 0.001
    return FloatWeight(values, scales, block)


def weight_of(kind: CodeKind, out: int, inputs: int, group: int, seed: int) -> IntegerWeight | FloatWeight:
    if kind is CodeKind.FLOAT8:
        return floats(out, inputs, (group, 2 * group), seed)
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(seed)).int() if seed % 2 else None
    return integers(kind, out, inputs, group, seed, order)


def layer_of(weight: IntegerWeight | FloatWeight, dtype: torch.dtype, *, bias: bool = False) -> TritonQuantisedLinear:
    out = len(weight.dense(dtype))
    own = torch.randn(out, generator=torch.Generator().manual_seed(out)).to(dtype) if bias else None
    return TritonQuantisedLinear(weight.quantised(), own, dtype).to(DEVICE)


@given(
    kind=kinds,
    out=st.integers(1, 70),
    groups=st.integers(1, 5),
    group=st.sampled_from([16, 32, 40, 64, 128]),
    seed=st.integers(0, 100),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@example(kind=CodeKind.INT4, out=33, groups=3, group=32, seed=1, dtype=torch.bfloat16)
@several
def test_every_weight_has_the_bits_of_the_dequantised_one(
    kind: CodeKind, out: int, groups: int, group: int, seed: int, dtype: torch.dtype
) -> None:
    """By `dense`, and by the kernel for many rows, whose product with unit vectors is the weight."""
    inputs = groups * group
    weight = weight_of(kind, out, inputs, group, seed)
    layer = layer_of(weight, dtype)
    expected = weight.dense(dtype)
    assert torch.equal(layer.dense().cpu(), expected)
    units = torch.eye(max(inputs, 129), inputs, dtype=dtype, device=DEVICE)
    assert torch.equal(layer(units)[:inputs].T.cpu(), expected)


@given(
    kind=kinds,
    rows=st.sampled_from([1, 3, 17, 64, 70]),
    out=st.integers(1, 70),
    groups=st.integers(1, 4),
    group=st.sampled_from([32, 40, 64, 128]),
    seed=st.integers(0, 100),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@example(kind=CodeKind.INT4, rows=128, out=31, groups=5, group=32, seed=1, bias=True, dtype=torch.bfloat16)
@example(kind=CodeKind.FLOAT8, rows=1, out=65, groups=3, group=128, seed=2, bias=False, dtype=torch.bfloat16)
@several
def test_products_of_few_rows_are_those_of_the_dequantised_weight(
    kind: CodeKind, rows: int, out: int, groups: int, group: int, seed: int, bias: bool, dtype: torch.dtype
) -> None:
    inputs = groups * group
    weight = weight_of(kind, out, inputs, group, seed)
    layer = layer_of(weight, dtype, bias=bias)
    x = torch.randn(1, rows, inputs, generator=torch.Generator().manual_seed(seed)).to(dtype)
    found = layer(x.to(DEVICE)).cpu()
    expected = x.double() @ weight.dense(dtype).double().T
    if layer.bias is not None:
        expected += layer.bias.cpu().double()
    scale = expected.abs().max().item() + 1e-6
    tolerance = scale * (2**-7 if dtype is torch.bfloat16 else 1e-5)
    assert found.shape == (1, rows, out)
    assert (found.double() - expected).abs().max() <= tolerance


@pytest.mark.parametrize("kind", CodeKind)
def test_merged_layers_give_their_outputs_side_by_side(kind: CodeKind) -> None:
    parts = [layer_of(weight_of(kind, out, 128, 32, 2), torch.float32) for out in (48, 16, 9)]
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert mergeable(parts)
    merged = TritonQuantisedLinear.merged(parts, None)
    torch.testing.assert_close(merged(x), torch.cat([part(x) for part in parts], dim=-1), rtol=1e-5, atol=1e-5)


def test_layers_of_different_forms_are_not_merged() -> None:
    def layer(kind: CodeKind = CodeKind.INT4, group: int = 32, seed: int = 2) -> TritonQuantisedLinear:
        return layer_of(weight_of(kind, 16, 128, group, seed), torch.float32)

    for other in (layer(CodeKind.INT8), layer(CodeKind.FLOAT8), layer(group=64), layer(seed=3)):
        assert not mergeable([layer(), other])
        assert not mergeable([other, layer()])
    assert not mergeable([layer(seed=3), layer(seed=5)])  # two orders of inputs
    assert not mergeable([layer(), torch.nn.Linear(128, 16)])


def test_a_weight_of_4_bits_takes_half_a_byte_and_its_scales() -> None:
    weight = weight_of(CodeKind.INT4, 256, 4096, 128, 2).quantised()
    assert weight.num_bytes == 256 * (4096 // 2 + 32 * (4 + 2))


def test_a_gpu_without_8_bit_floats_widens_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    gpu = torch.device("cuda", 0)
    assert [supports(kind, gpu) for kind in CodeKind] == [True, True, False]


def test_a_value_that_is_no_number_stays_in_its_row() -> None:
    layer = layer_of(weight_of(CodeKind.INT4, 16, 64, 32, 2), torch.float32)
    x = torch.zeros(4, 64, device=DEVICE)
    x[1, 3] = float("nan")
    assert layer(x).isnan().any(dim=-1).tolist() == [False, True, False, False]


def test_the_kernels_compile_for_hopper() -> None:
    """Triton's compiler and ptxas need no GPU; they see errors that the interpreter does not."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "engine.compile_for_hopper", "quantised"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, _ in compiled] == ["quantised_linear_kernel"] * 6 + ["dequantise_kernel"] * 3
    assert max(int(size) for _, size in compiled) <= 227 << 10
