"""Blocks of integers with a float32 scale and an int16 zero point, as `INTEGER_FORMATS` of grouped_weight.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.gguf_files import Blocks

INTEGER_SIZES = {f"INT{bits}_{inputs}": (inputs, 6 + inputs) for bits in (4, 8) for inputs in (32, 128)}
"""Weights and bytes of a block."""


def random_integer_blocks(kind: str, rows: int, columns: int, *, spread: float | None, seed: int = 0) -> Blocks:
    """Rows of blocks with random codes and zero points.

    Args:
        spread: about the standard deviation of the weights. None: scales have any finite bits.
    """
    inputs, size = INTEGER_SIZES[kind]
    levels = 1 << int(kind[3])
    draw = np.random.default_rng(seed)
    blocks = np.zeros((rows, columns // inputs, size), np.uint8)
    scale = draw.integers(0, 1 << 32, blocks.shape[:2], dtype=np.uint32) & np.uint32(0xBFFFFFFF)
    if spread is not None:
        scale = (spread / levels / 0.4 * draw.uniform(0.8, 1.2, blocks.shape[:2])).astype(np.float32).view(np.uint32)
    blocks[..., :4] = scale[..., None].view(np.uint8)
    blocks[..., 4:6] = draw.integers(-1, levels + 1, (*blocks.shape[:2], 1), dtype=np.int16).view(np.uint8)
    blocks[..., 6:] = draw.integers(0, levels, (*blocks.shape[:2], inputs), dtype=np.uint8)
    return blocks.reshape(rows, -1)


def integer_scales(kind: str, blocks: Blocks) -> tuple[Any, Any, Any]:
    """Return the scales and zero points of each block, [rows, blocks], and the codes, [rows, blocks, inputs]."""
    each = blocks.reshape(len(blocks), -1, INTEGER_SIZES[kind][1])
    scale = np.ascontiguousarray(each[..., :4]).view(np.float32)[..., 0]
    zero = np.ascontiguousarray(each[..., 4:6]).view(np.int16)[..., 0]
    return scale, zero, each[..., 6:]


def dequantised_integers(kind: str, blocks: Blocks) -> np.ndarray[Any, np.dtype[np.float32]]:
    scale, zero, codes = integer_scales(kind, blocks)
    values = (codes.astype(np.int32) - zero[..., None]).astype(np.float32) * scale[..., None]
    return np.ascontiguousarray(values.reshape(len(blocks), -1))
