"""Builds the input arrays of a step on the host, padded to a shape of the grid.

Padding tokens write to the null block, whose content is never used. Padding rows see only their own position there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace_engine.runner.batch import StepInputs
from headrace_engine.runner.sampling.graph_sampling import NUM_KNOBS, knobs_of, needs_host
from headrace_engine.runner.sampling.sampler import SamplingRow
from headrace_engine.runner.static.shapes import Shape


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """The arguments of `StaticDecoder.forward`, as int32 and float32 on the CPU."""

    tokens: torch.Tensor
    rows: torch.Tensor
    knobs: torch.Tensor


def empty_inputs(shape: Shape) -> StaticInputs:
    """Return inputs of padding only, for warm-up."""
    return StaticInputs(
        tokens=torch.zeros((4, shape.rows, shape.tokens), dtype=torch.int32),
        rows=torch.zeros((shape.rows, 2 + shape.blocks), dtype=torch.int32),
        knobs=torch.zeros((shape.rows, NUM_KNOBS), dtype=torch.float32),
    )


def pad(
    packed: StepInputs, sampling: Sequence[SamplingRow | None], shape: Shape, block_size: int, vocab_size: int
) -> StaticInputs:
    """Pad a packed batch to a shape.

    Args:
        sampling: one entry for each request of the batch, None if it gets no token in this step.
    """
    inputs = empty_inputs(shape)
    metadata = packed.metadata
    count = len(metadata.seq_lens)
    slots = metadata.slot_mapping.numpy()
    arrays = inputs.tokens.numpy()
    # there is one row, or each row has one token: so a packed batch fills the array from its start
    flat = np.stack([packed.input_ids.numpy(), packed.positions.numpy(), slots // block_size, slots % block_size])
    arrays.reshape(4, -1)[:, : flat.shape[1]] = flat
    rows = inputs.rows.numpy()
    rows[:count, 0] = np.diff(metadata.query_start.numpy()) - 1
    table = metadata.block_table.numpy()
    width = min(shape.blocks, table.shape[1])
    rows[:count, 2 : 2 + width] = table[metadata.table_rows.numpy(), :width]
    knobs = inputs.knobs.numpy()
    for index, row in enumerate(sampling):
        if row is not None and not needs_host(row):
            knobs[index], rows[index, 1] = knobs_of(row, vocab_size)
    return inputs
