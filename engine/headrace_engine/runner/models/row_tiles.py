"""Batch-invariant computation: divides a step into tiles with a fixed number of rows.

The last bits of a matrix product depend on its shape, because libraries choose another kernel or another order of sums
for another number of rows. In bfloat16 the difference shows in the logits (see "Defeating Nondeterminism in LLM
Inference", He 2025). So each forward pass gets exactly `TILE_ROWS` tokens, the last one with padding. Every operation
of the model then has a fixed shape, and the result of a row depends on that row only. Attention needs no tiles: the
compiled kernel sums over the blocks of a sequence in their order, in any step.

    step     [ a a a a a a a b c c c ]
    tiles    [ a a a a ] [ a a a b ] [ c c c - ]
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from headrace_engine.runner.attention.backend import AttentionMetadata
from headrace_engine.runner.batch import StepInputs

TILE_ROWS = 64


def split(inputs: StepInputs) -> Iterator[tuple[StepInputs, torch.Tensor]]:
    """Yield the tiles of a step in order, each with the indices of its wanted rows, [2, rows] int64.

    The first indices count among the logits of the step, the second in the tile. A tile with a wanted row computes the
    logits of all its rows, so that the last product has a fixed shape too.
    """
    num_tokens = len(inputs.input_ids)
    for start in range(0, num_tokens, TILE_ROWS):
        end = min(start + TILE_ROWS, num_tokens)
        indices = inputs.logits_indices
        logits_rows = ((indices >= start) & (indices < end)).nonzero()[:, 0]
        tile = replace(
            inputs,
            input_ids=_padded(inputs.input_ids[start:end]),
            positions=_padded(inputs.positions[start:end]),
            metadata=_part(inputs.metadata, start, end),
            logits_indices=torch.arange(TILE_ROWS if len(logits_rows) else 1),
            logits_start=None,
        )
        yield tile, torch.stack([logits_rows, indices[logits_rows] - start])


def _padded(values: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, TILE_ROWS - len(values)))


def _part(whole: AttentionMetadata, start: int, end: int) -> AttentionMetadata:
    """Return the metadata of tokens start to end. Each padding token is a sequence of its own in the null block."""
    begins, ends = whole.query_start[:-1].clamp(start, end), whole.query_start[1:].clamp(start, end)
    present = ends > begins
    cut = (whole.query_start[1:] - ends)[present]  # tokens of a sequence that belong to later tiles
    num_padding = TILE_ROWS - (end - start)
    padding_row = whole.block_table.shape[0] - 1
    return AttentionMetadata(
        query_start=torch.cat(
            [begins[present] - start, torch.arange(end - start, TILE_ROWS + 1, dtype=whole.query_start.dtype)]
        ),
        max_query_len=int((ends - begins).max()),
        seq_lens=torch.cat([whole.seq_lens[present] - cut, whole.seq_lens.new_ones(num_padding)]),
        table_rows=torch.cat([whole.table_rows[present], whole.table_rows.new_full((num_padding,), padding_row)]),
        block_table=whole.block_table,
        slot_mapping=_padded(whole.slot_mapping[start:end]),
    )
