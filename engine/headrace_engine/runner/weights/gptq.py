"""Reads checkpoints of GPTQ: 4 and 8 bits, both versions of zero points, act-order.

Format: `nn_modules/qlinear` and the conversion of version 1 in `utils/model.py` of https://github.com/ModelCloud/GPTQModel.
"""

from collections.abc import Mapping
from typing import Any

import torch

from headrace_engine.errors import ModelLoadError
from headrace_engine.runner.weights.integer_weight import IntegerWeight, unpack
from headrace_engine.runner.weights.module_tensors import ModuleTensors

_FORMATS = ("gptq", "gptq_v2")


class GPTQReader:
    """Reads the modules of one checkpoint.

    Args:
        config: the `quantization_config` of config.json.

    Raises:
        ModelLoadError: the checkpoint has a format that is not served.
    """

    marks = ("qweight",)
    """The tensors that only a quantised module has."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._format = config.get("checkpoint_format") or "gptq"
        if self._format not in _FORMATS or config.get("is_marlin_format"):
            name = "marlin" if config.get("is_marlin_format") else self._format
            raise ModelLoadError(
                f"the format {name!r} of GPTQ is not served: convert the checkpoint to one of {', '.join(_FORMATS)}"
            )
        self.bits = int(config.get("bits", 4))
        if self.bits not in (4, 8):
            raise ModelLoadError(f"GPTQ with {self.bits} bits is not served: take a checkpoint with 4 or 8")
        self._group = int(config.get("group_size", -1))
        self._has_rules = bool(config.get("dynamic"))
        self._symmetric = bool(config.get("sym", True))

    def read(self, tensors: ModuleTensors, out: int, inputs: int) -> IntegerWeight:
        """Read the weight of a linear layer. Raises ModelLoadError that names the tensor."""
        words = tensors.get("qweight", torch.int32)
        bits = next((each for each in (4, 8) if words.shape == (inputs * each // 32, out)), None)
        if bits is None or inputs * bits % 32 or out * bits % 32:
            raise tensors.error(
                "qweight",
                f"has the shape {list(words.shape)}, but {out} outputs of {inputs} inputs need "
                f"{[inputs // 8, out]} with 4 bits or {[inputs // 4, out]} with 8, which are served",
            )
        # rules of `dynamic` may change the group of a module
        group = None if "g_idx" in tensors or self._has_rules else self._group
        scales = tensors.scales_of_groups("scales", out, inputs, group)
        groups = len(scales)
        codes = unpack(words.t(), bits)
        order = tensors.order("g_idx", groups, inputs) if "g_idx" in tensors else None
        zeros = self._zeros(tensors, bits, groups, out).t()
        return IntegerWeight(bits, codes if order is None else codes[:, order.long()], scales.t(), zeros, order)

    def _zeros(self, tensors: ModuleTensors, bits: int, groups: int, out: int) -> torch.Tensor:
        """Return the codes of zero, int16 [groups, out].

        Version 1 stores the lowest bits of zero - 1, so the largest value is zero 0. Some files name version 1 and
        store version 2: in symmetric files the value decides, as all zero points are the middle.
        """
        middle = 1 << (bits - 1)
        if "qzeros" not in tensors and self._symmetric:
            return torch.full((groups, out), middle, dtype=torch.int16)
        stored = unpack(tensors.shaped("qzeros", (groups, out * bits // 32), torch.int32), bits).short()
        if not self._symmetric:
            return stored if self._format == "gptq_v2" else (stored + 1) % (2 * middle)
        low, high = int(stored.min()), int(stored.max())
        if low != high or low not in (middle - 1, middle):
            raise tensors.error(
                "qzeros",
                f"has zero points from {low} to {high}, but those of a symmetric file must all be {middle - 1} "
                f"(version 1) or all {middle} (version 2)",
            )
        return torch.full((groups, out), middle, dtype=torch.int16)
