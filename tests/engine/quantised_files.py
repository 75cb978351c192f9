"""Tiny quantised checkpoints in safetensors files, written from known integers by packers of this file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

Array = np.ndarray[Any, Any]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Integers:
    """What is written for one weight, w = scales (codes - zeros)."""

    bits: int
    codes: Array
    """[out, in]."""
    zeros: Array
    """[out, groups]."""
    scales: torch.Tensor
    """Of the type in the file, [out, groups]."""
    group_of: Array
    """The group of each input."""

    def dense(self) -> torch.Tensor:
        """The weight in float64."""
        values = self.codes.astype(np.float64) - self.zeros[:, self.group_of]
        return torch.from_numpy(values * self.scales.double().numpy()[:, self.group_of])


@dataclass(frozen=True)
class Kind:
    """A kind of checkpoint."""

    config: Mapping[str, Any]
    write: Callable[[Any], Tensors]
    bits: int = 4
    group: int | None = 128
    """Inputs of a group. None: all."""
    symmetric: bool = True
    act_order: bool = False
    zeros: tuple[int, int] = (0, 16)
    """The range of zero points that are not symmetric."""
    dtype: torch.dtype = torch.float16
    draw: Callable[[Kind, int, int, int, int], Any] | None = None
    """Draws a weight. None: integers."""


def draw_integers(kind: Kind, out: int, inputs: int, seed: int, order_seed: int = 0) -> Integers:
    """Random codes whose weights have a standard deviation of about 0.15.

    Args:
        order_seed: of the act-order.
    """
    draw = np.random.default_rng(seed)
    group = kind.group or inputs
    groups, levels = inputs // group, 1 << kind.bits
    zeros = np.full((out, groups), levels // 2)
    if not kind.symmetric:
        zeros = draw.integers(*kind.zeros, (out, groups)) * levels // 16
    spread = draw.uniform(0.8, 1.2, (out, groups)) * 0.15 / (0.29 * levels)
    group_of = np.arange(inputs) // group
    if kind.act_order:
        group_of = np.random.default_rng(order_seed).permutation(group_of)
    codes = draw.integers(0, levels, (out, inputs))
    return Integers(kind.bits, codes, zeros, torch.from_numpy(spread).to(kind.dtype), group_of)


def words(values: Array, bits: int, axis: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack values along an axis into int32 words, lowest bits first. `order`: the value in each place of a word."""
    count = 32 // bits
    values = np.moveaxis(values, axis, -1).astype(np.uint32)
    values = np.concatenate([values, np.zeros((*values.shape[:-1], -values.shape[-1] % count), np.uint32)], axis=-1)
    packed = np.zeros((*values.shape[:-1], values.shape[-1] // count), np.uint32)
    for place, value in enumerate(order or range(count)):
        packed |= values[..., value::count] << np.uint32(bits * place)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(packed, -1, axis)).view(np.int32))


def compressed_tensors_config(kind_format: str, **weights: Any) -> dict[str, Any]:
    group = weights.get("group_size")
    scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group" if group else "channel"}
    return {
        "quant_method": "compressed-tensors",
        "format": kind_format,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**scheme, **weights}}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def write_packed(integers: Integers) -> Tensors:
    """As `pack-quantized` of compressed-tensors."""
    tensors = {
        "weight_packed": words(integers.codes, integers.bits, axis=1),
        "weight_scale": integers.scales,
        "weight_shape": torch.tensor(integers.codes.shape),
    }
    if (integers.zeros != 1 << (integers.bits - 1)).any():
        tensors["weight_zero_point"] = words(integers.zeros, integers.bits, axis=0)
    if (np.diff(integers.group_of) < 0).any():
        tensors["weight_g_idx"] = torch.from_numpy(integers.group_of.astype(np.int32))
    return tensors


def packed(bits: int, group: int | None, *, symmetric: bool = True, **options: Any) -> Kind:
    config = compressed_tensors_config("pack-quantized", num_bits=bits, group_size=group, symmetric=symmetric)
    return Kind(config, write_packed, bits, group, symmetric, **options)


def write_awq(integers: Integers) -> Tensors:
    """As AWQ's `gemm`."""
    places = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": words(integers.codes.T, 4, axis=1, order=places),
        "qzeros": words(integers.zeros.T, 4, axis=1, order=places),
        "scales": integers.scales.T,
    }


def write_gptq(integers: Integers, stored_less: int) -> Tensors:
    """As GPTQ.

    Args:
        stored_less: 1 for version 1, which stores zero points less one; 0 for version 2.
    """
    return {
        "qweight": words(integers.codes.T, integers.bits, axis=0),
        "qzeros": words((integers.zeros.T - stored_less) % (1 << integers.bits), integers.bits, axis=1),
        "scales": integers.scales.T,
        "g_idx": torch.from_numpy(integers.group_of.astype(np.int32)),
    }


def awq(group: int, **options: Any) -> Kind:
    config = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": group, "zero_point": True}
    return Kind(config, write_awq, 4, group, symmetric=False, **options)


def gptq(
    bits: int, group: int | None, *, symmetric: bool = True, version: int = 1, named: int = 0, **options: Any
) -> Kind:
    """Return a kind of GPTQ.

    Args:
        version: of the zero points.
        named: the version in the configuration. 0: the same.
    """
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group or -1,
        "sym": symmetric,
        "desc_act": options.get("act_order", False),
        "checkpoint_format": "gptq_v2" if (named or version) == 2 else "gptq",
    }
    return Kind(config, partial(write_gptq, stored_less=2 - version), bits, group, symmetric, **options)


@dataclass(frozen=True)
class Floats:
    """What is written for one weight in float8, w = values * scales of its block."""

    values: torch.Tensor
    scales: torch.Tensor
    """[blocks of out, blocks of in]."""
    block: tuple[int, int]

    def dense(self) -> torch.Tensor:
        """The weight in float64."""
        rows, columns = (torch.arange(size) // each for size, each in zip(self.values.shape, self.block, strict=True))
        return self.values.double() * self.scales.double()[rows][:, columns]


def draw_floats(
    kind: Kind, out: int, inputs: int, seed: int, _: int, *, block: tuple[int | None, int | None]
) -> Floats:
    """Random float8 values whose weights have a standard deviation of about 0.15."""
    draw = np.random.default_rng(seed)
    rows, columns = block[0] or out, block[1] or inputs
    spread = draw.uniform(0.8, 1.2, (-(-out // rows), -(-inputs // columns))) * 0.15 / 40
    if kind.dtype is torch.float8_e8m0fnu:
        spread = 2.0 ** np.round(np.log2(spread))
    values = torch.from_numpy(draw.normal(0, 40, (out, inputs))).to(torch.float8_e4m3fn)
    return Floats(values, torch.from_numpy(spread).to(kind.dtype), (rows, columns))


def write_scaled(weight: Floats, name: str) -> Tensors:
    return {"weight": weight.values, name: weight.scales}


def fp8(block: tuple[int, int] | None, dtype: torch.dtype = torch.float32, *, scale_bytes: bool = False) -> Kind:
    """Return a kind of FP8. `block`: None for one scale for all weights. `scale_bytes`: store e8m0 as uint8."""
    config = {"quant_method": "fp8", "weight_block_size": block and list(block), "activation_scheme": "dynamic"}

    def write(weight: Floats) -> Tensors:
        scales = weight.scales.view(torch.uint8) if scale_bytes else weight.scales
        return {"weight": weight.values, "weight_scale_inv": scales if block else scales.view(())}

    return Kind(config, write, dtype=dtype, draw=partial(draw_floats, block=block or (None, None)))


def float_quantised(strategy: str, block: tuple[int | None, int | None], **weights: Any) -> Kind:
    config = compressed_tensors_config("float-quantized", num_bits=8, type="float", strategy=strategy, **weights)
    write = partial(write_scaled, name="weight_scale")
    return Kind(config, write, dtype=torch.bfloat16, draw=partial(draw_floats, block=block))


def write_int8(integers: Integers) -> Tensors:
    """As `int-quantized` of compressed-tensors."""
    tensors = {"weight": torch.from_numpy(integers.codes - 128).to(torch.int8), "weight_scale": integers.scales}
    if (integers.zeros != 128).any():
        tensors["weight_zero_point"] = torch.from_numpy(integers.zeros - 128).to(torch.int8)
    return tensors


def int_quantised(*, symmetric: bool = True) -> Kind:
    config = compressed_tensors_config("int-quantized", num_bits=8, group_size=None, symmetric=symmetric)
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    config["config_groups"]["group_0"]["input_activations"] = inputs
    return Kind(config, write_int8, 8, None, symmetric, dtype=torch.bfloat16)


KINDS: dict[str, Kind] = {
    "packed, 4 bits, groups of 32": packed(4, 32),
    "packed, 4 bits, groups of 128 with zeros": packed(4, 128, symmetric=False, dtype=torch.bfloat16),
    "packed, 4 bits, rows": packed(4, None, dtype=torch.float32),
    "packed, 8 bits, groups of 64 with zeros": packed(8, 64, symmetric=False),
    "packed, 8 bits, rows": packed(8, None, dtype=torch.bfloat16),
    "packed, 4 bits, act-order": packed(4, 128, symmetric=False, act_order=True),
    "awq, groups of 128": awq(128),
    "awq, groups of 64": awq(64, dtype=torch.bfloat16),
    "gptq 1, 4 bits": gptq(4, 128),
    "gptq 1, 4 bits with zeros": gptq(4, 32, symmetric=False),
    "gptq 2, 4 bits with zeros, act-order": gptq(4, 128, symmetric=False, version=2, act_order=True),
    "gptq 2 that is named 1": gptq(4, 64, version=2, named=1),
    "gptq 1, 8 bits, rows, act-order": gptq(8, None, symmetric=False, act_order=True),
    "gptq 2, 8 bits": gptq(8, 128, version=2),
    "int8": int_quantised(),
    "int8 with zeros": int_quantised(symmetric=False),
    "fp8, blocks": fp8((128, 128)),
    "fp8, blocks with an edge and scales in bfloat16": fp8((96, 96), torch.bfloat16),
    "fp8, blocks with powers of two": fp8((128, 128), torch.float8_e8m0fnu),
    "fp8, blocks with powers of two in bytes": fp8((128, 128), torch.float8_e8m0fnu, scale_bytes=True),
    "fp8, one scale": fp8(None),
    "float8, outputs": float_quantised("channel", (1, None)),
    "float8, one scale": float_quantised("tensor", (None, None)),
    "float8, blocks": float_quantised("block", (128, 128), block_structure=[128, 128]),
}


def write_checkpoint(
    folder: Path, kind: Kind, *, one_order: bool = True, change: Callable[[Tensors], None] = lambda _: None
) -> Any:
    """Write a tiny model whose linear layers, except the head, are quantised. Return it dequantised, in float32.

    Args:
        one_order: whether layers that read the same values have the same act-order, as real files do.
        change: changes the tensors before they are written.
    """
    options: dict[str, Any] = {
        "vocab_size": 160,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    config = transformers.LlamaConfig(**options)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    dense, tensors = model.state_dict(), {}
    for seed, name in enumerate(dense):
        value = dense[name]
        module, _, last = name.rpartition(".")
        if last == "weight" and type(model.get_submodule(module)) is torch.nn.Linear and module != "lm_head":
            shared = module.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_", "gate_")
            out, inputs = value.shape
            order_seed = sum((shared if one_order else module).encode())
            integers: Any = (kind.draw or draw_integers)(kind, out, inputs, seed, order_seed)
            value.copy_(integers.dense())
            tensors.update((f"{module}.{key}", tensor) for key, tensor in kind.write(integers).items())
        else:
            torch.manual_seed(seed)
            value.normal_(1.0 if "norm" in name else 0.0, 0.2 if value.dim() == 1 else 0.15)
            tensors[name] = value.clone()
    change(tensors)
    folder.mkdir(exist_ok=True)
    written = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(
        json.dumps({**config.to_dict(), "architectures": [type(model).__name__], "quantization_config": kind.config})
    )
    return model
