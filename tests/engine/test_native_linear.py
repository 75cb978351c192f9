"""The compiled linear layers: right, each row by itself, and the same on processors of every vector width."""

from __future__ import annotations

import platform

import pytest
import torch

from engine.kernel_builds import MAY_MULTIPLY_PAIRS, OTHER_PROCESSORS, PAIRS_ARE_FASTER, PAIRS_ARE_SLOWER, build
from headrace_engine.runner.elementwise.ops import Activation, Norm
from headrace_engine.runner.linear import native_linear
from headrace_engine.runner.linear.native_linear import NativeGatedLinear, NativeGeluLinear, NativeLinear

pytestmark = pytest.mark.rotated(
    "engine/headrace_engine/runner/linear",
    "engine/headrace_engine/runner/native",
    "engine/headrace_engine/runner/elementwise",
    "tests/engine/kernel_builds.py",
)

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
# Around a tile's rows, a block's, a panel's columns, a vector's, and the inputs after which sums are put aside.
shapes = pytest.mark.parametrize(
    ("rows", "in_features", "out_features"),
    [
        (0, 8, 8),
        (1, 1, 1),
        (1, 576, 960),
        (7, 70, 33),
        (9, 1100, 48),
        (30, 577, 50),
        (64, 2050, 100),
        (145, 96, 97),
        (300, 64, 16),
        (545, 64, 16),
    ],
)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to one rounding of the data's own type, and the order of float32 sums."""
    assert found.shape == expected.shape
    tolerance = 1e-2 if found.dtype is torch.bfloat16 else 2e-5
    scale = float(expected.abs().max()) if expected.numel() else 1.0
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance * scale / 10)


@dtypes
@shapes
@pytest.mark.parametrize("with_bias", [True, False])
def test_products_are_those_of_torch(
    dtype: torch.dtype, rows: int, in_features: int, out_features: int, with_bias: bool
) -> None:
    weight, x = random(out_features, in_features, dtype=dtype), random(rows, in_features, dtype=dtype)
    bias = random(out_features, dtype=dtype) if with_bias else None
    layer = NativeLinear(weight, bias)
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    close(layer(x), expected)
    close(layer(x[None])[0], expected)  # with the dimensions that a model gives it
    if rows > 1:
        close(layer(x[::2]), expected[::2])  # rows that do not lie side by side
        close(layer(x.t().contiguous().t()), expected)
    stream = random(rows, out_features, dtype=dtype)
    before = stream.clone()
    assert layer.add_to(stream, x) is None
    close(stream, expected + before.double())
    stream = before.clone()
    layer.add_to(stream, x, 0.22)
    close(stream, expected * 0.22 + before.double())


def activated(gate: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation is Activation.SILU:
        return torch.nn.functional.silu(gate)
    return torch.nn.functional.gelu(gate, approximate="tanh")


@dtypes
@pytest.mark.parametrize("rows", [1, 9, 150])
@pytest.mark.parametrize("width", [1, 48, 100])
@pytest.mark.parametrize("activation", Activation)
def test_gate_and_up_are_one_product(dtype: torch.dtype, rows: int, width: int, activation: Activation) -> None:
    weight, x = random(2 * width, 70, dtype=dtype), random(rows, 70, dtype=dtype)
    gate, up = torch.nn.functional.linear(x.double(), weight.double()).chunk(2, dim=-1)
    assert float(gate.min()) < -10 or gate.numel() < 100  # far into both tails of the sigmoid
    close(NativeGatedLinear(weight, activation)(x), activated(gate, activation) * up)


@dtypes
@pytest.mark.parametrize("features", [600, 2100])
def test_a_row_of_gate_and_up_depends_on_nothing_but_itself(dtype: torch.dtype, features: int) -> None:
    weight, x = random(2 * 100, features, dtype=dtype) / features**0.5, random(150, features, dtype=dtype)
    gate, up = torch.nn.functional.linear(x.double(), weight.double()).chunk(2, dim=-1)
    layer = NativeGatedLinear(weight)
    together = layer(x)
    close(together, torch.nn.functional.silu(gate) * up)
    for begin, end in ((0, 1), (3, 12), (40, 88), (40, 104), (149, 150)):
        assert torch.equal(layer(x[begin:end]), together[begin:end])


@dtypes
@pytest.mark.parametrize("activation", Activation)
def test_a_gate_of_any_size_is_as_exact_as_torchs(dtype: torch.dtype, activation: Activation) -> None:
    sizes = (0.0, 1e-30, 0.3, 5.0, 20.0, 80.0, 88.0, 200.0, 1e30)
    gate = torch.tensor([*sizes, *(-size for size in sizes)]).to(dtype)
    weight = torch.cat((gate, torch.ones(len(gate), dtype=dtype)))[:, None]
    output = NativeGatedLinear(weight, activation)(torch.ones(3, 1, dtype=dtype)).double()
    expected = activated(gate.double(), activation).expand(3, -1)
    atol = 1e-25 if activation is Activation.SILU else 2e-7  # torch's tanh loses the small side of GELU
    torch.testing.assert_close(output, expected, rtol=2**-7 if dtype is torch.bfloat16 else 2e-6, atol=atol)
    unknown = torch.full((2, 1), float("nan"), dtype=dtype)
    assert NativeGatedLinear(unknown)(torch.ones(3, 1, dtype=dtype)).isnan().all()


@dtypes
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (9, 48), (150, 100)])
def test_a_gelu_is_part_of_the_product(dtype: torch.dtype, rows: int, width: int) -> None:
    weight, bias, x = (random(*shape, dtype=dtype) for shape in ((width, 70), (width,), (rows, 70)))
    sums = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    close(NativeGeluLinear(weight, bias)(x), torch.nn.functional.gelu(sums))


def test_a_gelu_of_any_size_is_as_exact_as_torchs() -> None:
    sums = torch.cat((torch.linspace(-20, 20, 4001), torch.tensor([-1e30, -100.0, 0.0, 1e-30, 100.0, 1e30])))
    found = NativeGeluLinear(sums[:, None], None)(torch.ones(2, 1))
    expected = torch.nn.functional.gelu(sums.double())
    size = sums.abs().clamp(min=1)
    torch.testing.assert_close(found[1].double() / size, expected / size, rtol=0, atol=2e-7)
    assert NativeGeluLinear(torch.tensor([[float("nan")]]), None)(torch.ones(2, 1)).isnan().all()


@dtypes
@pytest.mark.parametrize("features", [5, 64, 1100])
def test_a_norm_in_front_is_part_of_the_product(dtype: torch.dtype, features: int) -> None:
    weight, x, delta = (random(n, features, dtype=dtype) for n in (90, 10, 10))
    norm = Norm(random(features, dtype=torch.float32) + 1, 1e-5)
    layer = NativeLinear(weight, None)
    stream = x.clone()
    summed = (x + delta).float()
    normed = summed * torch.rsqrt(summed.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight
    if dtype is torch.bfloat16 and native_linear.library().headrace_has_pairs():
        normed = normed.to(dtype)  # what is multiplied in bfloat16 is rounded to it
    normed = normed.double()
    close(layer.after_norm(stream, delta, norm), torch.nn.functional.linear(normed, weight.double()))
    assert torch.equal(stream, x + delta)
    close(layer(x), torch.nn.functional.linear(x.double(), weight.double()))  # and of no product after it


@dtypes
def test_a_row_depends_on_nothing_but_itself(dtype: torch.dtype) -> None:
    layer, x = NativeLinear(random(500, 1500, dtype=dtype), None), random(520, 1500, dtype=dtype)
    together, threads, stream = layer(x), torch.get_num_threads(), random(520, 500, dtype=dtype)
    added = stream.clone()
    layer.add_to(added, x)
    for begin, end in ((0, 1), (3, 5), (10, 17), (20, 29), (40, 88), (40, 104), (519, 520)):
        assert torch.equal(layer(x[begin:end]), together[begin:end])
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(layer(x), together)
            shared = stream.clone()
            layer.add_to(shared, x)
            assert torch.equal(shared, added)  # nothing is added twice
    finally:
        torch.set_num_threads(threads)
    x[7] = float("nan")
    found = layer(x)
    assert bool(found[7].isnan().all())
    assert torch.equal(found[8:], together[8:])
    assert torch.equal(found[:7], together[:7])


@dtypes
@pytest.mark.parametrize("rows", [3, 30])
def test_nothing_that_an_earlier_product_left_behind_is_multiplied(dtype: torch.dtype, rows: int) -> None:
    nothing = torch.full((600, 600), float("nan"), dtype=dtype)
    NativeLinear(nothing, None)(nothing)
    weight, x = random(50, 577, dtype=dtype), random(rows, 577, dtype=dtype)
    close(NativeLinear(weight, None)(x), torch.nn.functional.linear(x.double(), weight.double()))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86-64")
@pytest.mark.parametrize(
    ("flags", "preferred"), [(PAIRS_ARE_FASTER, True), (PAIRS_ARE_SLOWER, True), ("-mno-avx512bf16", False)]
)
def test_bfloat16_is_left_to_oneDNN_where_only_the_compiler_does_not_know_the_instructions_for_it(
    flags: str, preferred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = native_linear.declared(build("linear.c", "linear", flags))
    known = kernels.headrace_knows_pairs()
    capabilities = {"architecture": "x86_64", "avx2": True, "fma3": True, "avx512_bf16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(native_linear, "library", lambda: kernels)
    assert native_linear.preferred(torch.bfloat16) is (preferred and bool(known))
    assert native_linear.preferred(torch.float32)
    del capabilities["avx512_bf16"]
    assert native_linear.preferred(torch.bfloat16)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86-64")
@pytest.mark.parametrize("without", OTHER_PROCESSORS)
def test_narrower_vectors_compute_the_same(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = native_linear.declared(build("linear.c", "linear", without))
    assert without in MAY_MULTIPLY_PAIRS or not narrow.headrace_has_pairs()
    assert without != PAIRS_ARE_FASTER or narrow.headrace_has_pairs() == narrow.headrace_knows_pairs()
    assert without == "-mno-avx512vl" or not narrow.headrace_has_matrix_tiles()
    wide = without not in ("-mno-avx512f", "-mno-avx")
    assert wide or narrow.headrace_packed_size(0, False, 1, 1) < 48  # a panel of one input
    monkeypatch.setattr(native_linear, "library", lambda: narrow)
    for dtype in (torch.float32, torch.bfloat16):
        weight, x = random(70, 1101, dtype=dtype), random(200, 1101, dtype=dtype)
        expected = torch.nn.functional.linear(x.double(), weight.double())
        layer = NativeLinear(weight, None)
        together = layer(x)
        close(together, expected)
        for rows in (*range(1, 9), 13, 29):  # every size of a tile, two and more tiles
            assert torch.equal(layer(x[:rows]), together[:rows])
        gate, up = expected.chunk(2, dim=-1)
        close(NativeGatedLinear(weight)(x), torch.nn.functional.silu(gate) * up)
