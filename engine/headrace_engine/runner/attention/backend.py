"""What an attention backend is: it owns the K/V memory in the layout that suits it, and attends over it.

A packed step, all sequences behind one another in one row of tokens:

    query_start   [0,        5, 6, 7,              12]     first token of each sequence
    tokens        [ prefill   d  d  prefill chunk   ]
    seq_lens      [5,        31, 8, 40]                    K/V tokens after this step, the step's own included
"""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(slots=True, kw_only=True)
class AttentionMetadata:
    """Where the tokens of one step belong. Tensors lie where the model does; int32 unless said otherwise."""

    query_start: torch.Tensor
    """[sequences + 1]"""
    seq_lens: torch.Tensor
    """[sequences]"""
    table_rows: torch.Tensor
    """[sequences] row of each sequence in `block_table`."""
    block_table: torch.Tensor
    """[rows, max blocks a sequence]; the last row is padding's and holds the null block only."""
    slot_mapping: torch.Tensor
    """[tokens] int64: block id * block size + offset, where each token's K/V go."""
    max_query_len: int
    """Most tokens of one sequence in this step: what a launch on a device is planned from without reading tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """The shape of one attention layer. Layers of one model may differ."""

    num_heads: int
    num_kv_heads: int
    k_dim: int
    """Size of a query or key head."""
    v_dim: int
    window: int | None = None
    """A token sees that many tokens, itself included; None means all before it."""
    kv_source: int | None = None
    """The earlier layer whose K/V this one reads; None means that it has its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """All attention layers of a model, in the order in which a forward pass computes them."""

    layers: tuple[LayerSpec, ...]
    block_size: int
    dtype: torch.dtype
    """Of queries, keys, values and output."""
    cache_dtype: torch.dtype | None = None
    """What keys and values are kept in; None means `dtype`."""

    @property
    def kept_dtype(self) -> torch.dtype:
        return self.cache_dtype or self.dtype


def scale_of(scaling: float | None, k_dim: int) -> float:
    """What scores are multiplied by, where a model says it or leaves it to the size of its heads."""
    return k_dim**-0.5 if scaling is None else float(scaling)


class AttentionBackend(Protocol):
    name: str

    @property
    def bytes_per_block(self) -> int:
        """K/V memory of one block over all layers."""

    def allocate(self, num_blocks: int) -> None:
        """Take the K/V memory of all layers."""

    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Write K/V of this step into the cache, unless another layer's are read, then attend causally.

        query [tokens, heads, k_dim], key [tokens, kv_heads, k_dim], value [tokens, kv_heads, v_dim] -> [tokens, heads,
        v_dim]. `softcap` c: scores become c * tanh(score / c). `sinks` [heads]: a logit without a value in each
        head's softmax.
        """
