"""Reads checkpoints of compressed-tensors: `pack-quantized`, `int-quantized` and `float-quantized`.

Format: `compressors/` of https://github.com/vllm-project/compressed-tensors.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch

from headrace_engine.errors import ModelLoadError
from headrace_engine.runner.weights.float_weight import FloatWeight, number_of_blocks
from headrace_engine.runner.weights.integer_weight import IntegerWeight, unpack
from headrace_engine.runner.weights.module_tensors import ModuleTensors

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


class CompressedTensorsReader:
    """Reads the modules of one checkpoint.

    Args:
        config: the `quantization_config` of config.json.

    Raises:
        ModelLoadError: the checkpoint has a format that is not served.
    """

    marks = ("weight_packed", "weight_scale")
    """The tensors that only a quantised module has."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._groups = list((config.get("config_groups") or {}).values())
        for group in self._groups or [{}]:
            name = group.get("format") or config.get("format")
            if name not in _FORMATS:
                raise ModelLoadError(
                    f"the format {name!r} of compressed-tensors is not served: {', '.join(_FORMATS)} are"
                )
        schemes = [group.get("weights") or {} for group in self._groups]
        self.bits = min((int(scheme.get("num_bits") or 8) for scheme in schemes), default=8)
        sparse = (config.get("sparsity_config") or {}).get("format", "dense")
        if sparse != "dense":
            raise ModelLoadError(f"sparse weights ({sparse}) are not served: take a checkpoint without sparsity")

    def read(self, tensors: ModuleTensors, out: int, inputs: int) -> IntegerWeight | FloatWeight:
        """Read the weight of a linear layer. Raises ModelLoadError that names the tensor."""
        scheme = self._scheme_of(tensors.module)
        if "weight_packed" in tensors:
            return self._read_packed(tensors, out, inputs, scheme)
        values = tensors.shaped("weight", (out, inputs), torch.int8, torch.float8_e4m3fn)
        if values.dtype is torch.float8_e4m3fn:
            return _read_floats(tensors, values, scheme)
        scales = _scales(tensors, out, inputs, scheme)
        zeros = _zeros(tensors, 8, scales, symmetric=scheme.get("symmetric", True))
        return IntegerWeight(8, values.view(torch.uint8) ^ 128, scales, zeros, input_bytes=1)

    def _read_packed(self, tensors: ModuleTensors, out: int, inputs: int, scheme: Mapping[str, Any]) -> IntegerWeight:
        packed = tensors.get("weight_packed", torch.int32)
        bits = next((each for each in (4, 8) if packed.shape == (out, inputs * each // 32)), None)
        if bits is None or inputs * bits % 32:
            raise tensors.error(
                "weight_packed",
                f"has the shape {list(packed.shape)}, but {out} outputs of {inputs} inputs need "
                f"{[out, inputs // 8]} with 4 bits or {[out, inputs // 4]} with 8, which are served",
            )
        if "weight_shape" in tensors:
            shape = tensors.get("weight_shape", torch.int64, torch.int32).tolist()
            if shape != [out, inputs]:
                raise tensors.error("weight_shape", f"is {shape}, but the model needs {[out, inputs]}")
        scales = _scales(tensors, out, inputs, scheme)
        order = None
        if "weight_g_idx" in tensors and int(tensors.get("weight_g_idx", torch.int32).min()) != -1:  # -1: unused
            order = tensors.order("weight_g_idx", scales.shape[1], inputs)
        codes = unpack(packed, bits)
        zeros = _zeros(tensors, bits, scales, symmetric=scheme.get("symmetric", True))
        return IntegerWeight(bits, codes if order is None else codes[:, order.long()], scales, zeros, order)

    def _scheme_of(self, module: str) -> Mapping[str, Any]:
        """Return the `weights` entry of the group that targets a module."""
        found = [group for group in self._groups if any(_matches(each, module) for each in group.get("targets", ()))]
        found = found or [group for group in self._groups if "Linear" in group.get("targets", ())]
        return (found[0].get("weights") or {}) if found else {}


def _matches(target: str, module: str) -> bool:
    return bool(re.match(target[3:], module)) if target.startswith("re:") else target == module


def _read_floats(tensors: ModuleTensors, values: torch.Tensor, scheme: Mapping[str, Any]) -> FloatWeight:
    """Read the scales of float8 weights: one, one for each output, or one for each block."""
    out, inputs = values.shape
    scales = tensors.scales("weight_scale").float()
    if scales.numel() == 1:
        return FloatWeight(values, scales.view(1, 1), (out, inputs))
    rows, columns = scheme.get("block_structure") or (1, inputs)
    if scales.dim() == 1:
        scales = scales[:, None]
    blocks = number_of_blocks(out, inputs, (rows, columns))
    if scales.shape != blocks:
        raise tensors.error("weight_scale", f"has the shape {list(scales.shape)}, but the model needs {list(blocks)}")
    return FloatWeight(values, scales, (rows, columns))


def _scales(tensors: ModuleTensors, out: int, inputs: int, scheme: Mapping[str, Any]) -> torch.Tensor:
    """Return the scales, [out, groups]. One for all weights or for all inputs is allowed."""
    scales = tensors.scales("weight_scale")
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(out, 1)
    if scales.shape == (out,):
        scales = scales[:, None]
    group = scheme.get("group_size") or 0
    if group > 0 and inputs % group:
        raise tensors.error("weight_scale", f"is for groups of {group}, which do not divide {inputs} inputs")
    groups = inputs // group if group > 0 else 1 if scheme else scales.shape[-1]
    if scales.shape != (out, groups) or inputs % groups:
        raise tensors.error("weight_scale", f"has the shape {list(scales.shape)}, but the model needs {[out, groups]}")
    return scales


def _zeros(tensors: ModuleTensors, bits: int, scales: torch.Tensor, *, symmetric: bool) -> torch.Tensor:
    """Return the codes of zero, int16 [out, groups]. They are packed along the outputs, or int8."""
    middle, (out, groups) = 1 << (bits - 1), scales.shape
    name = "weight_zero_point"
    if symmetric and name not in tensors:
        return torch.full((out, groups), middle, dtype=torch.int16)
    zeros = tensors.get(name, torch.int32, torch.int8)
    if zeros.dtype is torch.int8:
        return tensors.shaped(name, (out, groups), torch.int8).short() + middle
    words = tensors.shaped(name, (-(-out * bits // 32), groups), torch.int32)
    return unpack(words.t(), bits)[:, :out].t().short()
