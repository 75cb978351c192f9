"""Paged attention in plain torch: slow, simple, and correct for every shape. The reference for the kernels."""

import torch

from headrace_engine.runner.attention.backend import AttentionMetadata, AttentionSpec


class ReferenceBackend:
    """K/V memory is `[slots, kv_heads, k_dim or v_dim]` for each layer. Computes one sequence after the other."""

    name = "torch"

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._k_cache: list[torch.Tensor] = []
        self._v_cache: list[torch.Tensor] = []

    @property
    def bytes_per_block(self) -> int:
        own = (layer for layer in self._spec.layers if layer.kv_source is None)
        elements = sum(layer.num_kv_heads * (layer.k_dim + layer.v_dim) for layer in own)
        return elements * self._spec.block_size * self._spec.stored_dtype.itemsize

    def allocate(self, num_blocks: int) -> None:
        num_slots, dtype = num_blocks * self._spec.block_size, self._spec.stored_dtype
        self._k_cache, self._v_cache = [], []
        for layer in self._spec.layers:
            if layer.kv_source is None:
                self._k_cache.append(torch.zeros((num_slots, layer.num_kv_heads, layer.k_dim), dtype=dtype))
                self._v_cache.append(torch.zeros((num_slots, layer.num_kv_heads, layer.v_dim), dtype=dtype))
            else:
                self._k_cache.append(self._k_cache[layer.kv_source])
                self._v_cache.append(self._v_cache[layer.kv_source])

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
        spec = self._spec.layers[layer]
        k_cache, v_cache = self._k_cache[layer], self._v_cache[layer]
        if spec.kv_source is None:
            k_cache[metadata.slot_mapping] = key.to(k_cache.dtype)
            v_cache[metadata.slot_mapping] = value.to(v_cache.dtype)
        output = query.new_empty((*query.shape[:-1], spec.v_dim))
        starts = metadata.query_start.tolist()
        for index, (length, row) in enumerate(
            zip(metadata.seq_lens.tolist(), metadata.table_rows.tolist(), strict=True)
        ):
            tokens = slice(starts[index], starts[index + 1])
            slots = self._slots(metadata.block_table[row], length)
            output[tokens] = _attend(
                query[tokens],
                k_cache[slots],
                v_cache[slots],
                scale=scale,
                window=spec.window,
                softcap=softcap,
                sinks=sinks,
            )
        return output

    def _slots(self, table: torch.Tensor, length: int) -> torch.Tensor:
        size = self._spec.block_size
        blocks = table[: -(-length // size)].long()
        return (blocks[:, None] * size + torch.arange(size)).flatten()[:length]


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend over one sequence. query [q, heads, k_dim] is at the last q positions of key [k, kv_heads, k_dim]."""
    num_queries, num_heads, _ = query.shape
    num_keys, num_kv_heads, _ = key.shape
    group = num_heads // num_kv_heads
    keys = key.float().repeat_interleave(group, dim=1)
    values = value.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float() * scale, keys)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    query_positions = torch.arange(num_keys - num_queries, num_keys)[:, None]
    key_positions = torch.arange(num_keys)[None, :]
    hidden = key_positions > query_positions
    if window:
        hidden |= key_positions <= query_positions - window
    scores.masked_fill_(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(num_heads, num_queries, 1)
        weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
