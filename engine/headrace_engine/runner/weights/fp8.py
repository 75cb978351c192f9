"""Reads checkpoints of the method `fp8`: float8_e4m3fn with a scale for each block or for all weights.

Format: `integrations/finegrained_fp8.py` of transformers.
"""

from collections.abc import Mapping
from typing import Any

import torch

from headrace_engine.errors import ModelLoadError
from headrace_engine.runner.weights.float_weight import FloatWeight, number_of_blocks
from headrace_engine.runner.weights.module_tensors import ModuleTensors


class FP8Reader:
    """Reads the modules of one checkpoint.

    Args:
        config: the `quantization_config` of config.json.

    Raises:
        ModelLoadError: the blocks have no valid size.
    """

    marks = ("weight_scale_inv", "weight_scale")
    """The tensors that only a quantised module has."""
    bits = 8

    def __init__(self, config: Mapping[str, Any]) -> None:
        size = config.get("weight_block_size")
        if size is not None and (len(size) != 2 or any(not isinstance(each, int) or each < 1 for each in size)):
            raise ModelLoadError(f"weight_block_size must be two sizes of at least 1, got {size}")
        self._block = None if size is None else (int(size[0]), int(size[1]))

    def read(self, tensors: ModuleTensors, out: int, inputs: int) -> FloatWeight:
        """Read the weight of a linear layer. Raises ModelLoadError that names the tensor."""
        values = tensors.shaped("weight", (out, inputs), torch.float8_e4m3fn)
        # a product, whatever the name says
        name = next(mark for mark in self.marks if mark in tensors)
        scales = tensors.scales(name, torch.float8_e8m0fnu, torch.uint8).float()
        if scales.numel() == 1:
            return FloatWeight(values, scales.view(1, 1), (out, inputs))
        block = self._block or (1, inputs)
        if scales.shape != number_of_blocks(out, inputs, block):
            wanted = list(number_of_blocks(out, inputs, block))
            raise tensors.error(name, f"has the shape {list(scales.shape)}, but blocks of {list(block)} need {wanted}")
        return FloatWeight(values, scales, block)
