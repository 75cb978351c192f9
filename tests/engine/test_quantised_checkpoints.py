"""Quantised safetensors checkpoints: their values, the tokens of transformers on them, and wrong files by tensor."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.packed_models import generate, load, workload
from engine.quantised_files import (
    KINDS,
    Kind,
    Tensors,
    compressed_tensors_config,
    draw_integers,
    gptq,
    packed,
    write_checkpoint,
)
from engine.tiny_models import TinyModel
from headrace_engine.errors import ConfigError, ModelLoadError
from headrace_engine.runner.fused.decoder_stack import DecoderStack
from headrace_engine.runner.linear import grouped_linear
from headrace_engine.runner.linear.grouped_linear import GroupedLinear
from headrace_engine.runner.linear.native_linear import NativeGatedLinear, NativeLinear
from headrace_engine.runner.models import weight_memory
from headrace_engine.runner.weights.integer_weight import IntegerWeight
from headrace_engine.runner.weights.module_tensors import ModuleTensors
from headrace_engine.runner.weights.quantised_checkpoint import WeightReader, reader_for

pytestmark = [
    pytest.mark.rotated(
        "engine/headrace_engine/runner/linear",
        "engine/headrace_engine/runner/models",
        "engine/headrace_engine/runner/weights",
        "engine/headrace_engine/runner/fused",
        "tests/engine/quantised_files.py",
        "tests/engine/packed_models.py",
    ),
    pytest.mark.skipif(not grouped_linear.supported(torch.float32), reason="the kernels need AVX2 or AVX-512"),
]

ACT_ORDER, ZEROS = "packed, 4 bits, act-order", "packed, 4 bits, groups of 128 with zeros"
FP8, INT8 = "fp8, blocks", "int8 with zeros"
AWQ, GPTQ = "awq, groups of 128", "gptq 1, 4 bits"
MODULE = "model.layers.1.mlp.up_proj"
Change = Callable[[Tensors], None]
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
def test_tokens_are_those_of_transformers_on_dequantised_weights(kind: str, tmp_path: Path) -> None:
    reference = TinyModel("tiny", str(tmp_path), write_checkpoint(tmp_path, KINDS[kind]))
    expected = [reference.generate(prompt, max_tokens) for prompt, max_tokens in workload()]
    assert generate(tmp_path) == expected
    assert len({tuple(output) for output in expected}) > len(expected) / 2


def reader_and_tensors(kind: Kind, written: Tensors) -> tuple[WeightReader, ModuleTensors]:
    read = {name: partial(written.__getitem__, name) for name in written}
    return reader_for("tiny", kind.config), ModuleTensors("m", read)


@kinds
def test_every_weight_has_the_value_of_the_file(kind: str) -> None:
    weight: Any = (KINDS[kind].draw or draw_integers)(KINDS[kind], 64, 256, 3, 5)
    reader, tensors = reader_and_tensors(KINDS[kind], KINDS[kind].write(weight))
    found = reader.read(tensors, 64, 256)
    assert torch.equal(found.dense(torch.float32), weight.dense().float())
    if isinstance(found, IntegerWeight):
        assert torch.equal(found.grouped().dense(torch.float32), weight.dense().float())


@kinds
def test_dequantised_weights_are_counted_with_the_memory_that_they_take(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_checkpoint(tmp_path, KINDS[kind])
    needed = 4 * sum(parameter.numel() for parameter in model.parameters())
    monkeypatch.setattr(grouped_linear, "supported", lambda _: False)
    monkeypatch.setattr(weight_memory, "available_memory", lambda: needed - 1)
    with pytest.raises(ConfigError, match=r"take [\d.]+ GiB as float32, but only [\d.]+ GiB of memory are free"):
        load(tmp_path)
    monkeypatch.setattr(weight_memory, "available_memory", lambda: int(1.2 * needed))  # scales and zero points
    load(tmp_path)


@kinds
def test_packed_weights_are_counted_with_the_memory_that_they_take(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, KINDS[kind])
    model = load(tmp_path, enable_lora=True)  # layers are not merged
    dense = (layer for layer in model.modules() if type(layer) is NativeLinear)
    needed = sum(parameter.nbytes for parameter in model.parameters())
    needed += sum(4 * layer.in_features * layer.out_features for layer in dense)
    needed += sum(weight.strips.nbytes for weight in grouped_linear.grouped_weights(model))
    monkeypatch.setattr(weight_memory, "available_memory", lambda: needed - 1)
    with pytest.raises(ConfigError, match=r"take [\d.]+ GiB as packed blocks, but only [\d.]+ GiB of memory are free"):
        load(tmp_path)
    monkeypatch.setattr(weight_memory, "available_memory", lambda: int(1.02 * needed))  # scales of FP8
    load(tmp_path)


def values_of(layer: Any) -> torch.Tensor:
    """The weight of a layer, by its products with unit vectors if it is not packed."""
    if isinstance(layer, GroupedLinear):
        return layer.dense()
    with torch.no_grad():
        units = torch.eye(layer.in_features)
        found: torch.Tensor = (layer(units) - layer(torch.zeros(1, layer.in_features))).T
    return found


@pytest.mark.parametrize("kind", [ACT_ORDER, AWQ, FP8])
def test_without_kernels_layers_are_dequantised(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grouped_linear, "supported", lambda _: False)
    expected = write_checkpoint(tmp_path, KINDS[kind])
    model = load(tmp_path, enable_lora=True)  # layers are not merged
    assert "the checkpoint is dequantised: this machine has no compiled kernels for packed weights" in caplog.text
    for name, module in expected.named_modules():
        if type(module) is torch.nn.Linear:
            assert torch.equal(values_of(model.get_submodule(name)), module.weight), name


def test_one_call_computes_all_layers(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, KINDS[ACT_ORDER])
    model = load(tmp_path)
    assert [type(layer) for layer in model.model.layers] == [DecoderStack]
    layer = model.model.layers[0]._layers[0]
    assert [weight.format.name for weight in layer.qkv.weights] == ["INT4_128"] * 3


def test_layers_whose_inputs_are_in_different_orders_are_merged_dequantised(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, KINDS[ACT_ORDER], one_order=False)
    reference = TinyModel("tiny", str(tmp_path), model)
    assert generate(tmp_path) == [reference.generate(*request) for request in workload()]
    layer = load(tmp_path).model.layers[0]._layers[0]
    assert [type(part) for part in (layer.qkv, layer.gated)] == [NativeLinear, NativeGatedLinear]


def test_the_tensors_of_a_module_decide_its_bits_and_its_group_and_whether_it_is_quantised(tmp_path: Path) -> None:
    other = draw_integers(gptq(8, 64), 512, 256, seed=9)
    plain, plain_weight = "model.layers.0.self_attn.k_proj", torch.full((64, 256), 0.5)

    def change(tensors: Tensors) -> None:
        tensors.update((f"{MODULE}.{name}", tensor) for name, tensor in gptq(8, 64).write(other).items())
        for name in [name for name in tensors if name.startswith(plain)]:
            del tensors[name]
        tensors[f"{plain}.weight"] = plain_weight

    write_checkpoint(tmp_path, KINDS[GPTQ], change=change)
    model = load(tmp_path, enable_lora=True)
    assert torch.equal(values_of(model.get_submodule(MODULE)), other.dense().float())
    assert torch.equal(values_of(model.get_submodule(plain)), plain_weight)


def test_groups_that_no_kernel_has_are_dequantised_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = TinyModel("tiny", str(tmp_path), write_checkpoint(tmp_path, packed(4, 16)))
    with caplog.at_level(logging.WARNING):
        assert generate(tmp_path) == [reference.generate(*request) for request in workload()]
    assert "14 linear layers are dequantised, to 4 MiB: packed stay groups of a multiple of 32 inputs" in caplog.text


def put(name: str, at: int, value: float) -> Change:
    """Change one number of a tensor."""

    def change(tensors: Tensors) -> None:
        tensor = tensors[f"{MODULE}.{name}"].contiguous()
        tensor.view(-1)[at] = value
        tensors[f"{MODULE}.{name}"] = tensor

    return change


def cut(name: str, dimension: int = 0) -> Change:
    """Cut off the last row or column of a tensor."""

    def change(tensors: Tensors) -> None:
        tensor = tensors[f"{MODULE}.{name}"]
        tensors[f"{MODULE}.{name}"] = tensor.narrow(dimension, 0, tensor.shape[dimension] - 1).clone()

    return change


def drop(name: str) -> Change:
    def change(tensors: Tensors) -> None:
        del tensors[f"{MODULE}.{name}"]

    return change


def cast(name: str, dtype: torch.dtype) -> Change:
    def change(tensors: Tensors) -> None:
        tensors[f"{MODULE}.{name}"] = tensors[f"{MODULE}.{name}"].to(dtype)

    return change


def rename(old: str, new: str) -> Change:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


WRONG: list[tuple[str, Change, str]] = [
    (ZEROS, drop("weight_scale"), "weight_scale' is missing, but the module is quantised"),
    (ZEROS, drop("weight_zero_point"), "weight_zero_point' is missing, but the module is quantised"),
    (ZEROS, cut("weight_scale", 1), "weight_scale' has the shape [512, 1], but the model needs [512, 2]"),
    (
        ZEROS,
        cut("weight_packed"),
        "weight_packed' has the shape [511, 32], but 512 outputs of 256 inputs need [512, 32]",
    ),
    (ZEROS, cut("weight_zero_point"), "weight_zero_point' has the shape [63, 2], but the model needs [64, 2]"),
    (ZEROS, put("weight_shape", 1, 255), "weight_shape' is [512, 255], but the model needs [512, 256]"),
    (ZEROS, put("weight_scale", 15, float("nan")), "weight_scale' has a scale that is not finite at [7, 1]"),
    (ZEROS, put("weight_scale", 3, float("-inf")), "weight_scale' has a scale that is not finite at [1, 1]"),
    (ZEROS, cast("weight_packed", torch.int64), "weight_packed' is of type int64, but must be int32"),
    (ACT_ORDER, put("weight_g_idx", 9, 2), "weight_g_idx' has the group 2, but there are 2 groups"),
    (ACT_ORDER, put("weight_g_idx", 9, -2), "weight_g_idx' has the group -2, but there are 2 groups"),
    (ACT_ORDER, cut("weight_g_idx"), "weight_g_idx' has the shape [255], but the model needs [256]"),
    (AWQ, cut("qweight"), "qweight' has the shape [255, 64], but the model needs [256, 64]"),
    (AWQ, drop("qzeros"), "qzeros' is missing, but the module is quantised"),
    (AWQ, cut("scales"), "scales' has the shape [1, 512], but the model needs [256 / 128, 512]"),
    (AWQ, put("scales", 5, float("inf")), "scales' has a scale that is not finite at [0, 5]"),
    (
        GPTQ,
        cut("qweight"),
        "qweight' has the shape [31, 512], but 512 outputs of 256 inputs need [32, 512] with 4 bits",
    ),
    (GPTQ, cut("qzeros", 1), "qzeros' has the shape [2, 63], but the model needs [2, 64]"),
    (
        GPTQ,
        put("qzeros", 3, 0x77777787),
        "qzeros' has zero points from 7 to 8, but those of a symmetric file must all be 7",
    ),
    (
        GPTQ,
        put("qzeros", 3, 0x66666666),
        "qzeros' has zero points from 6 to 7, but those of a symmetric file must all be",
    ),
    (GPTQ, cast("qzeros", torch.float16), "qzeros' is of type float16, but must be int32"),
    (GPTQ, cut("scales"), "g_idx' has the group 1, but there are 1 groups"),
    (GPTQ, put("g_idx", 255, 7), "g_idx' has the group 7, but there are 2 groups"),
    (GPTQ, drop("scales"), "scales' is missing, but the module is quantised"),
    (FP8, drop("weight"), "weight' is missing, but the module is quantised"),
    (FP8, cut("weight_scale_inv", 1), "weight_scale_inv' has the shape [4, 1], but blocks of [128, 128] need [4, 2]"),
    (FP8, put("weight_scale_inv", 5, float("nan")), "weight_scale_inv' has a scale that is not finite at [2, 1]"),
    (FP8, cast("weight", torch.int8), "weight' is of type int8, but must be float8_e4m3fn"),
    (INT8, drop("weight_zero_point"), "weight_zero_point' is missing, but the module is quantised"),
    (INT8, cut("weight", 1), "weight' has the shape [512, 255], but the model needs [512, 256]"),
    (ZEROS, rename("up_proj", "experts.0.up_proj"), "is no linear layer of a LlamaForCausalLM: quantised experts"),
    (ZEROS, lambda tensors: tensors.update({f"{MODULE}.bias": torch.ones(512)}), "bias' is not zero, but the layer of"),
]


@pytest.mark.parametrize(("kind", "change", "message"), WRONG)
def test_a_wrong_file_is_refused_with_its_tensor_and_its_value(
    kind: str, change: Change, message: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, KINDS[kind], change=change)
    with pytest.raises(ModelLoadError) as caught:
        load(tmp_path)
    assert message in str(caught.value)


def test_groups_of_unequal_size_are_refused(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{MODULE}.weight_g_idx"][:] = torch.arange(256) // 200

    write_checkpoint(tmp_path, KINDS[ACT_ORDER], change=change)
    with pytest.raises(ModelLoadError, match="weight_g_idx' has groups of 56 to 200 inputs: all must be equal"):
        load(tmp_path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, KINDS[ZEROS])
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"cannot be loaded: .*incomplete metadata, file not fully covered"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (compressed_tensors_config("marlin-24"), "the format 'marlin-24' of compressed-tensors is not served"),
        (
            compressed_tensors_config("nvfp4-pack-quantized"),
            "the format 'nvfp4-pack-quantized' of compressed-tensors is",
        ),
        (
            compressed_tensors_config("pack-quantized") | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparse weights (sparse-24-bitmask) are not served",
        ),
        ({"quant_method": "awq", "version": "gemv"}, "AWQ in the format 'gemv' with 4 bits is not served"),
        ({"quant_method": "awq", "version": "marlin"}, "AWQ in the format 'marlin' with 4 bits is not served"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "the format 'marlin' of GPTQ is not served"),
        ({"quant_method": "gptq", "is_marlin_format": True}, "the format 'marlin' of GPTQ is not served"),
        (
            compressed_tensors_config("pack-quantized", group_size=96),
            "is for groups of 96, which do not divide 512 inputs",
        ),
    ],
)
def test_a_kind_that_is_not_served_is_refused_by_its_name(config: Any, message: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, replace(packed(4, 32), config=config))
    with pytest.raises(ModelLoadError) as caught:
        load(tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_weights_are_those_of_the_decompressor_of_compressed_tensors(bits: int, symmetric: bool) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    kind = packed(bits, 64, symmetric=symmetric, dtype=torch.float32)
    integers = draw_integers(kind, 40, 256, seed=bits)
    tensors = kind.write(integers)
    scheme = quantization.QuantizationScheme(
        targets=["Linear"],
        weights=quantization.QuantizationArgs(num_bits=bits, group_size=64, symmetric=symmetric, strategy="group"),
    )
    theirs = compressors.PackedQuantizationCompressor.decompress(tensors, scheme)["weight"]
    assert torch.equal(theirs, integers.dense().float())
    reader, own = reader_and_tensors(kind, tensors)
    ours = reader.read(own, 40, 256)
    assert isinstance(ours, IntegerWeight)
    assert torch.equal(ours.dense(torch.float32), theirs)
    assert torch.equal(ours.grouped().dense(torch.float32), theirs)
