"""Batch-invariant computation: a step's rows in tiles that always have the same number of rows.

A matrix product's last bit depends on its shape, because libraries choose another kernel or another order of sums for
another number of rows; in bfloat16 that is seen in the logits (after "Defeating Nondeterminism in LLM Inference",
He 2025). So each forward pass gets exactly `TILE_ROWS` tokens, the last one padded: every operation of the model then
has one shape for ever, and what a row becomes depends on that row alone. Attention is not part of that: the compiled
kernel sums over a sequence's own blocks in their order, whatever else is in the step.

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
    """The step's tiles in order; for each wanted row its place among the step's logits, and its row of the tile.

    [2, rows] int64. A tile that is wanted at all gives logits of all its rows, so that the last product has the same
    shape too.
    """
    num_tokens = len(inputs.input_ids)
    for start in range(0, num_tokens, TILE_ROWS):
        end = min(start + TILE_ROWS, num_tokens)
        indices = inputs.logits_indices
        places = ((indices >= start) & (indices < end)).nonzero()[:, 0]
        tile = replace(
            inputs,
            input_ids=_padded(inputs.input_ids[start:end]),
            positions=_padded(inputs.positions[start:end]),
            metadata=_part(inputs.metadata, start, end),
            logits_indices=torch.arange(TILE_ROWS if len(places) else 1),
            logits_start=None,
        )
        yield tile, torch.stack([places, indices[places] - start])


def _padded(values: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, TILE_ROWS - len(values)))


def _part(whole: AttentionMetadata, start: int, end: int) -> AttentionMetadata:
    """Tokens start to end of the step; each token of padding is a sequence of its own in the null block."""
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
