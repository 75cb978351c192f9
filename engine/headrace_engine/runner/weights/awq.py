"""Reads checkpoints of AWQ in its `gemm` format, with 4 bits.

Format: `quantization/awq/utils/packing_utils.py` of https://github.com/ModelCloud/GPTQModel.
"""

from collections.abc import Mapping
from typing import Any

import torch

from headrace_engine.errors import ModelLoadError
from headrace_engine.runner.weights.integer_weight import IntegerWeight, unpack
from headrace_engine.runner.weights.module_tensors import ModuleTensors

_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # in a word, of eight adjacent outputs


class AWQReader:
    """Reads the modules of one checkpoint.

    Args:
        config: the `quantization_config` of config.json.

    Raises:
        ModelLoadError: the checkpoint has a format that is not served.
    """

    marks = ("qweight",)
    """The tensors that only a quantised module has."""
    bits = 4

    def __init__(self, config: Mapping[str, Any]) -> None:
        version, bits = str(config.get("version", "gemm")).lower(), config.get("bits", config.get("w_bit", 4))
        if version != "gemm" or bits != 4:
            raise ModelLoadError(
                f"AWQ in the format {version!r} with {bits} bits is not served: convert it to gemm with 4 bits"
            )
        self._group = int(config.get("group_size", config.get("q_group_size", -1)))
        self._has_zeros = bool(config.get("zero_point", True))

    def read(self, tensors: ModuleTensors, out: int, inputs: int) -> IntegerWeight:
        """Read the weight of a linear layer. Raises ModelLoadError that names the tensor."""
        if out % 8:
            raise tensors.error("qweight", f"is for {out} outputs, but AWQ packs 8 of them")
        words = tensors.shaped("qweight", (inputs, out // 8), torch.int32)
        scales = tensors.scales_of_groups("scales", out, inputs, self._group)
        groups = len(scales)
        zeros = torch.full((groups, out), 8, dtype=torch.int16)
        if self._has_zeros or "qzeros" in tensors:
            zeros = _ordered(tensors.shaped("qzeros", (groups, out // 8), torch.int32)).short()
        return IntegerWeight(4, _ordered(words).t().contiguous(), scales.t(), zeros.t())


def _ordered(words: torch.Tensor) -> torch.Tensor:
    """Return the codes of the outputs in their order: int32 [n, out / 8] -> uint8 [n, out]."""
    return unpack(words, 4).view(len(words), -1, 8)[..., _PLACES].flatten(1)
