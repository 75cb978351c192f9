"""Weights in groups of few bits: the values of the file, and products that are exact where they can be.

The integer driver is compared with a model in numpy, bit by bit, on this processor and as compiled for lesser ones. The
other driver is compared with the products of the dequantised weights.
"""

from __future__ import annotations

import ctypes
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from engine import gguf_files
from engine.gguf_files import HALVES, SIZES, Blocks
from engine.integer_blocks import INTEGER_SIZES, dequantised_integers, integer_scales, random_integer_blocks
from engine.kernel_builds import build
from headrace_engine.runner.elementwise.ops import Norm
from headrace_engine.runner.linear import grouped_linear, native_linear
from headrace_engine.runner.linear.grouped_linear import (
    GroupedGatedLinear,
    GroupedLinear,
    replace_embedding,
)
from headrace_engine.runner.linear.grouped_weight import FORMATS, INTEGER_FORMATS, BadScaleError, GroupedWeight
from headrace_engine.runner.linear.native_linear import NativeGatedLinear, NativeLinear

pytestmark = [
    pytest.mark.rotated(
        "engine/headrace_engine/runner/linear",
        "engine/headrace_engine/runner/native",
        "tests/engine/kernel_builds.py",
        "tests/engine/gguf_files.py",
    ),
    pytest.mark.skipif(not grouped_linear.supported(torch.float32), reason="the kernels need AVX2 or AVX-512"),
]

ALL_SIZES = {**SIZES, **INTEGER_SIZES}
ALL_FORMATS = {**FORMATS, **{kind.name: kind for kind in INTEGER_FORMATS.values()}}
formats = pytest.mark.parametrize("kind", ALL_SIZES)
roundings = pytest.mark.parametrize(
    ("kind", "input_bytes"), [*((kind, 1) for kind in ALL_SIZES), *((kind, 2) for kind in INTEGER_SIZES)]
)
INTEGERS, UNPACKED = 1, 2  # in linear.h
LESSER_PROCESSORS = [
    *("-mno-amx-bf16", "-mno-avx512vnni", "-mno-avx512f", "-mno-avx512f -mno-avxvnni"),
    # as in the wheels with kernels
    "-march=x86-64-v3",
    *(["-march=x86-64-v4"] if torch.cpu.get_capabilities().get("avx512_bw") else []),
]


def random_bytes(kind: str, rows: int, columns: int) -> Blocks:
    if kind in INTEGER_SIZES:
        return random_integer_blocks(kind, rows, columns, spread=None)
    return gguf_files.random_bytes(kind, rows, columns)


def random_blocks(kind: str, rows: int, columns: int, *, spread: float) -> Blocks:
    make = random_integer_blocks if kind in INTEGER_SIZES else gguf_files.random_blocks
    return make(kind, rows, columns, spread=spread)


def dequantised(kind: str, blocks: Blocks) -> Any:
    return (dequantised_integers if kind in INTEGER_SIZES else gguf_files.dequantised)(kind, blocks)


def layer_of(
    kind: str, out_features: int, in_features: int, dtype: torch.dtype = torch.float32, input_bytes: int = 1
) -> GroupedLinear:
    blocks = random_blocks(kind, out_features, in_features, spread=0.1)
    weight = GroupedWeight(ALL_FORMATS[kind], blocks, input_bytes=input_bytes)
    return GroupedLinear([weight], None, dtype, batch_invariant=True)


def rows(count: int, features: int) -> torch.Tensor:
    return torch.randn(count, features, generator=torch.Generator().manual_seed(count + features))


@formats
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 256), (16, 512), (37, 768)])
def test_any_bits_of_a_block_are_the_values_that_gguf_gives_them(kind: str, outputs: int, inputs: int) -> None:
    blocks = random_bytes(kind, outputs, inputs)
    expected = torch.from_numpy(dequantised(kind, blocks))
    weight = GroupedWeight(ALL_FORMATS[kind], blocks)
    assert torch.equal(weight.dense(torch.float32), expected)
    assert torch.equal(weight.dense(torch.bfloat16), expected.bfloat16())
    order = np.random.default_rng(1).permutation(outputs).astype(np.int32)
    assert torch.equal(GroupedWeight(ALL_FORMATS[kind], blocks, order).dense(torch.float32), expected[order])


def test_a_weight_larger_than_a_part_is_packed_part_by_part() -> None:
    blocks = random_bytes("Q8_0", 8200, 2048)  # 17 MiB
    released: list[int] = []
    weight = GroupedWeight(FORMATS["Q8_0"], blocks, release=lambda part: released.append(len(part)))
    assert len(released) == 2
    assert sum(released) == 8200
    assert torch.equal(weight.dense(torch.float32), torch.from_numpy(dequantised("Q8_0", blocks)))


@formats
@pytest.mark.parametrize("value", [0x7C00, 0xFC00, 0x7E01], ids=["infinity", "minus infinity", "nan"])
def test_a_scale_that_is_not_finite_is_found_with_its_row(kind: str, value: Any) -> None:
    value = np.array([value], np.uint16).view(np.float16).astype(np.float32 if kind in INTEGER_SIZES else np.float16)
    for at in HALVES.get(kind, (0,)):
        blocks = random_bytes(kind, 40, 512).reshape(40, -1, ALL_SIZES[kind][1])
        blocks[23, -1, at : at + value.nbytes] = value.view(np.uint8)
        with pytest.raises(BadScaleError, match="row 23 has a scale that is not finite"):
            GroupedWeight(ALL_FORMATS[kind], blocks.reshape(40, -1))


def fused(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once to float32. The product of two float32 numbers has 48 bits; this type has 64."""
    return (np.asarray(a, np.longdouble) * np.asarray(b, np.longdouble) + np.asarray(c, np.longdouble)).astype(
        np.float32
    )


def scales_of(kind: str, blocks: Blocks) -> tuple[Any, Any, Any]:
    """Return the float32 scales and minimums of each 16 weights, and d: [out, in / 16] each."""
    weights, size = ALL_SIZES[kind]
    each = blocks.reshape(len(blocks), -1, size)

    def half(at: int) -> Any:
        return np.ascontiguousarray(each[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)

    def spread(values: Any) -> Any:
        values = values.reshape(len(blocks), each.shape[1], -1)
        return np.repeat(values, weights // 16 // values.shape[-1], axis=-1).reshape(len(blocks), -1)

    zeros = np.zeros((len(blocks), each.shape[1], 1), np.float32)
    if kind in INTEGER_SIZES:
        return spread(integer_scales(kind, blocks)[0]), spread(zeros), spread(zeros)
    if kind == "Q6_K":
        return spread(each[..., 192:208].view(np.int8).astype(np.float32)), spread(zeros), spread(half(208))
    if kind in ("Q4_K", "Q5_K"):
        scale, minimum = gguf.quants.Q4_K.get_scale_min(each[..., 4:16].reshape(-1, 12))
        d, m = (half(at).reshape(-1, 1) for at in (0, 2))
        return spread(d * scale.astype(np.float32)), spread(-(m * minimum.astype(np.float32))), spread(zeros)
    if kind == "IQ4_XS":
        shifts = np.arange(8)
        low = each[..., 4:8].repeat(2, axis=-1) >> (4 * (shifts % 2)).astype(np.uint8) & 15
        high = np.ascontiguousarray(each[..., 2:4]).view(np.uint16).astype(np.int32) >> 2 * shifts & 3
        return spread(half(0)[..., None] * (low + 16 * high - 32).astype(np.float32)), spread(zeros), spread(zeros)
    return spread(half(0)), spread(half(2)) if kind in ("Q4_1", "Q5_1") else spread(zeros), spread(zeros)


def integer_products(kind: str, blocks: Blocks, x: Any, input_bytes: int) -> Any:
    """What linear_integer.h computes, in numpy: [rows, in] float32 -> [rows, out] float32."""
    levels, factor = rounded_inputs(x)
    sums = rounded_products(kind, blocks, levels, factor)
    if input_bytes == 1:
        return sums
    rest = fused(-factor[..., None], levels, x.reshape(levels.shape)).reshape(x.shape)
    return sums + rounded_products(kind, blocks, *rounded_inputs(rest))


def rounded_inputs(x: Any) -> tuple[Any, Any]:
    """Round rows to int8: [rows, in] -> [rows, groups, 32], and the scales, [rows, groups]."""
    groups = x.reshape(len(x), -1, 32)
    largest = np.abs(groups).max(axis=-1)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(largest < 1e-30, np.float32(0), np.float32(127) / largest)
    levels = np.rint(groups * inverse[..., None]).astype(np.int64)
    return levels, np.where(largest < 1e-30, np.float32(0), largest / np.float32(127))


def rounded_products(kind: str, blocks: Blocks, levels: Any, factor: Any) -> Any:
    """The products of rows that are rounded: [rows, out] float32."""
    count, inputs = len(levels), levels.shape[1] * 32
    scale, added, d = scales_of(kind, blocks)
    step = scale * d if kind == "Q6_K" else scale
    step, lift = (np.repeat(part, 16, axis=1) for part in (step, added))
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.nan_to_num(np.rint((dequantised(kind, blocks).astype(np.float64) - lift) / step)).astype(np.int64)
    sums = np.zeros((count, len(blocks)), np.float32)
    for group in range(inputs // 32):
        first, second = 2 * group, 2 * group + 1
        own, x_scale = levels[:, group], factor[:, group, None]
        parts = [own[:, at : at + 16] @ codes[:, 32 * group + at : 32 * group + at + 16].T for at in (0, 16)]
        if kind == "Q6_K":
            whole = parts[0] * scale[:, first].astype(np.int64) + parts[1] * scale[:, second].astype(np.int64)
            sums = fused(d[:, first] * x_scale, whole, sums)
        elif np.any(added):
            lifted = added[:, first] * own.sum(axis=1, dtype=np.float32)[:, None]
            sums = fused(x_scale, fused(scale[:, first], parts[0] + parts[1], lifted), sums)
        else:
            sums = fused(scale[:, first] * x_scale, parts[0] + parts[1], sums)
    return sums


def by_integers(kernels: ctypes.CDLL, layer: GroupedLinear, x: torch.Tensor, threads: int) -> torch.Tensor:
    return product(kernels, layer, x, threads, INTEGERS)


def product(kernels: ctypes.CDLL, layer: GroupedLinear, x: torch.Tensor, threads: int, driver: int) -> torch.Tensor:
    out = torch.empty(len(x), layer.out_features, dtype=x.dtype)
    args = layer.args()
    args.driver, args.threads, args.rows = driver, threads, len(x)
    args.x, args.x_stride, args.out, args.out_stride = x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0)
    assert kernels.headrace_linear(ctypes.byref(args)) == 0
    return out


@roundings
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(32, 1), (96, 15), (256, 17), (896, 48), (512, 100), (2048, 33), (256, 1000)]
)
def test_products_by_integers_are_those_of_the_model_in_every_bit(
    kind: str, input_bytes: int, inputs: int, outputs: int
) -> None:
    if inputs % ALL_SIZES[kind][0]:
        pytest.skip("a row is no whole number of blocks")
    layer, x = layer_of(kind, outputs, inputs, input_bytes=input_bytes), rows(70, inputs)
    x[3], x[5, 32:] = 0, 1e-38  # without any level, and without a normal one
    blocks = random_blocks(kind, outputs, inputs, spread=0.1)
    expected = torch.from_numpy(integer_products(kind, blocks, x.numpy(), input_bytes))
    kernels = native_linear.library()
    for count in range(1, 71) if inputs < 900 and outputs < 200 else (1, 2, 3, 5, 8, 9, 16, 63, 64, 65, 70):
        assert torch.equal(by_integers(kernels, layer, x[:count], 1 + count % 4), expected[:count]), count


@roundings
@pytest.mark.parametrize("without", LESSER_PROCESSORS)
def test_lesser_processors_give_the_same_bits(kind: str, input_bytes: int, without: str) -> None:
    lesser = build("linear.c", "linear", without)
    layer, x = layer_of(kind, 100, 768, input_bytes=input_bytes), rows(70, 768)
    x[:8] = torch.tensor([127.0, -127.0]).repeat(384)  # codes and inputs of the largest magnitude
    expected = by_integers(native_linear.library(), layer, x, 2)
    for count in (1, 2, 3, 4, 7, 70):
        assert torch.equal(by_integers(lesser, layer, x[:count], 2), expected[:count])
    assert torch.equal(product(lesser, layer, x, 2, UNPACKED), NativeLinear(layer.dense(), None)(x))


@pytest.mark.parametrize(("kind", "input_bytes"), [("Q4_K", 1), ("INT4_128", 2)])
def test_the_scratch_space_of_many_rows_is_limited(kind: str, input_bytes: int) -> None:
    kernels, layer = native_linear.library(), layer_of(kind, 40, 768, input_bytes=input_bytes)

    def scratch(count: int) -> int:
        args = layer.args()
        args.driver, args.threads, args.rows = INTEGERS, 2, count
        return int(kernels.headrace_linear_scratch_floats(ctypes.byref(args)))

    assert scratch(32) < scratch(512) == scratch(8192)
    x = rows(1100, 768)
    parts = torch.cat([by_integers(kernels, layer, part, 2) for part in x.split(100)])
    assert torch.equal(by_integers(kernels, layer, x, 2), parts)


@pytest.mark.parametrize(("kind", "input_bytes"), [("Q8_0", 1), ("Q4_K", 1), ("Q6_K", 1), ("INT4_32", 2)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_stays_by_itself(kind: str, input_bytes: int, bad: float) -> None:
    layer, x = layer_of(kind, 40, 512, input_bytes=input_bytes), rows(9, 512)
    expected = by_integers(native_linear.library(), layer, x, 2)
    x[4, 300] = bad
    found = by_integers(native_linear.library(), layer, x, 2)
    assert found[4].isnan().all()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(found[others], expected[others])


@formats
@pytest.mark.parametrize("count", [1, 2, 7, 9, 64, 150])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 256), (50, 768), (97, 2048)])
def test_in_float32_products_equal_those_of_dequantised_weights(
    kind: str, count: int, outputs: int, inputs: int
) -> None:
    layer = layer_of(kind, outputs, inputs)
    layer.bias = torch.nn.Parameter(rows(1, outputs)[0], requires_grad=False)
    dense, x = NativeLinear(layer.dense(), layer.bias), rows(count, inputs)
    assert torch.equal(layer(x), dense(x))
    assert torch.equal(layer(x[None])[0], dense(x))
    norm = Norm(rows(1, inputs)[0].contiguous(), 1e-5)
    assert torch.equal(layer.after_norm(x.clone(), None, norm), dense.after_norm(x.clone(), None, norm))
    found, expected = torch.ones(count, outputs), torch.ones(count, outputs)
    layer.add_to(found, x)
    dense.add_to(expected, x)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, 9, 70])
def test_segments_of_several_types_are_one_layer(dtype: torch.dtype, count: int) -> None:
    sizes = {"Q4_K": 100, "Q5_0": 17, "Q6_K": 48, "Q8_0": 5}
    parts = [layer_of(kind, size, 512, dtype) for kind, size in sizes.items()]
    bias = rows(1, 170)[0].to(dtype)
    whole, x = GroupedLinear.merged(parts, bias), rows(count, 512).to(dtype)
    for part, own in zip(parts, torch.split(bias, [*sizes.values()]), strict=True):
        part.bias = torch.nn.Parameter(own.clone(), requires_grad=False)
    assert torch.equal(whole(x), torch.cat([part(x) for part in parts], dim=1))


@pytest.mark.parametrize("count", [1, 9, 70])
@pytest.mark.parametrize("width", [1, 48, 100])
def test_gate_and_up_of_two_types_are_one_product(count: int, width: int) -> None:
    gate, up = layer_of("Q4_K", width, 768), layer_of("Q6_K", width, 768)
    x = rows(count, 768)
    dense = NativeGatedLinear(torch.cat([gate.dense(), up.dense()]))
    assert torch.equal(GroupedGatedLinear.merged([gate, up], None)(x), dense(x))
    narrow = [GroupedLinear(each.weights, None, torch.bfloat16, batch_invariant=True) for each in (gate, up)]
    found = GroupedGatedLinear.merged(narrow, None)(x.bfloat16()).float()
    assert (found - dense(x)).norm() < 0.03 * dense(x).norm() + 0.03 * dense(x).numel() ** 0.5


@roundings
def test_many_rows_in_bfloat16_are_multiplied_by_matrix_tiles_unless_batch_invariant(
    kind: str, input_bytes: int
) -> None:
    if not native_linear.library().headrace_has_matrix_tiles():
        pytest.skip("this processor has no matrix tiles")
    invariant = layer_of(kind, 100, 768, torch.bfloat16, input_bytes)
    few = 32 // input_bytes
    free = GroupedLinear(invariant.weights, None, torch.bfloat16, batch_invariant=False)
    x = rows(150, 768).bfloat16()
    dense = NativeLinear(free.dense(), None)
    assert torch.equal(free(x), dense(x))
    assert torch.equal(free(x[:few]), dense(x[:few]))
    assert torch.equal(free(x[: few - 1]), invariant(x[: few - 1]))
    assert torch.equal(invariant(x)[:1], invariant(x[:1]))
    assert not torch.equal(invariant(x), dense(x))


@pytest.mark.parametrize("kind", INTEGER_SIZES)
def test_inputs_of_two_bytes_are_as_precise_as_bfloat16(kind: str) -> None:
    layer, x = layer_of(kind, 100, 768, input_bytes=2), rows(70, 768).bfloat16().float()
    expected = x.double() @ layer.dense().double().T
    found = by_integers(native_linear.library(), layer, x, 2).double()
    assert (found - expected).norm() < 2e-5 * expected.norm()
    layer = layer_of(kind, 100, 768, input_bytes=1)
    assert (by_integers(native_linear.library(), layer, x, 2) - expected).norm() > 2e-3 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_an_embedding_reads_its_rows_and_keeps_what_its_class_adds(dtype: torch.dtype) -> None:
    class Scaled(torch.nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
            return super().forward(input) * torch.tensor(3.0, dtype=self.weight.dtype)

    blocks = random_blocks("Q6_K", 70, 256, spread=1)
    ids = torch.tensor([[0, 69, 3], [15, 16, 3]])
    for kind, factor in ((torch.nn.Embedding, 1), (Scaled, 3)):
        module = kind(70, 256)
        replace_embedding(module, GroupedWeight(FORMATS["Q6_K"], blocks), dtype)
        table = torch.from_numpy(dequantised("Q6_K", blocks)).to(dtype)
        assert torch.equal(module(ids), table[ids] * factor)
        assert not list(module.parameters())
        with pytest.raises(IndexError, match="from 0 to 69, got 70"):
            module(torch.tensor([70]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, 7, 70])
@pytest.mark.parametrize("without", ["", *LESSER_PROCESSORS[1:]])
def test_inputs_in_another_order_are_gathered(dtype: torch.dtype, count: int, without: str) -> None:
    kernels = build("linear.c", "linear", without) if without else native_linear.library()
    native_linear.declared(kernels)
    order = torch.randperm(768, generator=torch.Generator().manual_seed(1)).int()
    blocks = random_blocks("INT4_128", 50, 768, spread=0.1)
    plain, ordered = (
        GroupedLinear(
            [GroupedWeight(INTEGER_FORMATS[4, 128], blocks, inputs=inputs)], None, dtype, batch_invariant=True
        )
        for inputs in (None, order)
    )
    assert torch.equal(ordered.dense()[:, order.long()], plain.dense())
    x = rows(count, 768).to(dtype)
    gathered = x[:, order.long()].contiguous()
    driver = INTEGERS if dtype is torch.bfloat16 else UNPACKED
    assert torch.equal(product(kernels, ordered, x, 2, driver), product(kernels, plain, gathered, 2, driver))


def test_a_norm_before_inputs_in_another_order_has_their_weights() -> None:
    order = torch.randperm(512, generator=torch.Generator().manual_seed(1)).int()
    blocks = random_blocks("INT8_128", 50, 512, spread=0.1)
    layer = GroupedLinear(
        [GroupedWeight(INTEGER_FORMATS[8, 128], blocks, inputs=order)], None, torch.float32, batch_invariant=True
    )
    norm, x = Norm(rows(1, 512)[0], 1e-5), rows(9, 512)
    expected = NativeLinear(layer.dense(), None).after_norm(x.clone(), None, norm)
    torch.testing.assert_close(layer.after_norm(x.clone(), None, norm), expected)
