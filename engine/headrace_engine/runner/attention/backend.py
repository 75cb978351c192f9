"""`AttentionBackend`: owns the K/V memory, in a layout of its choice, and computes attention over it.

A packed step has the tokens of all sequences in one row:

    query_start   [0,        5, 6, 7,              12]     first token of each sequence
    tokens        [ prefill   d  d  prefill chunk   ]
    seq_lens      [5,        31, 8, 40]                    K/V tokens after this step
"""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(slots=True, kw_only=True)
class AttentionMetadata:
    """The sequences of a step and their blocks. Tensors are on the device of the model, and int32 unless noted."""

    query_start: torch.Tensor
    """[sequences + 1]"""
    seq_lens: torch.Tensor
    """[sequences]"""
    table_rows: torch.Tensor
    """[sequences] row of each sequence in `block_table`."""
    block_table: torch.Tensor
    """[rows, max blocks of a sequence]. The last row is for padding and holds only the null block."""
    slot_mapping: torch.Tensor
    """[tokens] int64: the slot of K/V of each token, block id * block size + offset."""
    max_query_len: int
    """Maximum number of tokens of a sequence in this step. Kernel launches are planned from this, without a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """The shape of one attention layer. The layers of a model may differ."""

    num_heads: int
    num_kv_heads: int
    k_dim: int
    """Size of a query or key head."""
    v_dim: int
    window: int | None = None
    """How many tokens a token sees, including itself. None: all tokens before it."""
    kv_source: int | None = None
    """The earlier layer whose K/V this one reads. None: it has its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """All attention layers of a model, in the order of the forward pass."""

    layers: tuple[LayerSpec, ...]
    block_size: int
    dtype: torch.dtype
    """The type of queries, keys, values and output."""
    cache_dtype: torch.dtype | None = None
    """The type of stored keys and values. None: `dtype`."""

    @property
    def stored_dtype(self) -> torch.dtype:
        return self.cache_dtype or self.dtype


def scale_of(scaling: float | None, k_dim: int) -> float:
    """Return the factor of attention scores: the model's own, or the default for the size of a head."""
    return k_dim**-0.5 if scaling is None else float(scaling)


class AttentionBackend(Protocol):
    name: str

    @property
    def bytes_per_block(self) -> int:
        """K/V memory of one block in all layers."""

    def allocate(self, num_blocks: int) -> None:
        """Allocate the K/V memory of all layers."""

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
        """Write K/V of this step to the cache, unless the layer reads another layer's K/V. Then attend causally.

        query [tokens, heads, k_dim], key [tokens, kv_heads, k_dim], value [tokens, kv_heads, v_dim] -> [tokens, heads,
        v_dim]. `softcap` c: scores become c * tanh(score / c). `sinks` [heads]: for each head, one more logit in the
        softmax, which has no value.
        """
