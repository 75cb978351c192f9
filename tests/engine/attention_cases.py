"""Attention problems, and the same written out in float64: what every backend is measured by."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace_engine.runner.attention.backend import AttentionBackend, AttentionMetadata, AttentionSpec, LayerSpec


@dataclass(frozen=True)
class Problem:
    sequences: tuple[tuple[int, int], ...]
    """(tokens in the cache, tokens of this step) of each sequence"""
    kv_heads: int = 1
    group: int = 1
    k_dim: int = 16
    v_dim: int = 16
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    spread: float = 1.0
    seed: int = 0


class Case:
    """Random queries, keys and values of a problem, and where they lie in the cache.

    Keys and values are such as the cache can keep, so that what is expected of it does not depend on its rounding.
    """

    def __init__(
        self, problem: Problem, dtype: torch.dtype, device: str = "cpu", cache_dtype: torch.dtype | None = None
    ) -> None:
        self.problem, self.dtype, self.device, self.cache_dtype = problem, dtype, device, cache_dtype
        draw = torch.Generator().manual_seed(problem.seed)
        self.lengths = [past + new for past, new in problem.sequences]
        self.heads = problem.kv_heads * problem.group
        kept = cache_dtype or dtype
        self.query, self.key, self.value = (
            [(torch.randn(length, heads, dim, generator=draw) * spread).to(to).to(dtype) for length in self.lengths]
            for heads, dim, spread, to in (
                (self.heads, problem.k_dim, problem.spread, dtype),
                (problem.kv_heads, problem.k_dim, 1.0, kept),
                (problem.kv_heads, problem.v_dim, 1.0, kept),
            )
        )
        self.sinks = torch.randn(self.heads, generator=draw) if problem.sinks else None
        self.scale = problem.k_dim**-0.5
        most = max(-(-length // problem.block_size) for length in self.lengths)
        self.num_blocks = 1 + len(self.lengths) * most
        ids = 1 + torch.randperm(self.num_blocks - 1, generator=draw)
        # One row more than there are sequences, and sequences in another order than rows: as in a real step.
        self.rows = torch.randperm(len(self.lengths) + 1, generator=draw)[: len(self.lengths)].to(torch.int32)
        self.table = torch.zeros(len(self.lengths) + 1, most, dtype=torch.int32)
        self.table[self.rows.long()] = ids.reshape(len(self.lengths), most).to(torch.int32)

    def spec(self) -> AttentionSpec:
        p = self.problem
        layer = LayerSpec(num_heads=self.heads, num_kv_heads=p.kv_heads, k_dim=p.k_dim, v_dim=p.v_dim, window=p.window)
        return AttentionSpec(layers=(layer,), block_size=p.block_size, dtype=self.dtype, cache_dtype=self.cache_dtype)

    def metadata(self, spans: list[tuple[int, int]]) -> AttentionMetadata:
        """A step that computes these (first, end) positions."""
        size = self.problem.block_size
        positions = [torch.arange(first, end) for first, end in spans]
        slots = [
            self.table[row, p // size] * size + p % size for row, p in zip(self.rows.long(), positions, strict=True)
        ]
        counts = [end - first for first, end in spans]
        return AttentionMetadata(
            query_start=torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(self.device),
            seq_lens=torch.tensor([end for _, end in spans], dtype=torch.int32).to(self.device),
            table_rows=self.rows.to(self.device),
            block_table=self.table.to(self.device),
            slot_mapping=torch.cat(slots).long().to(self.device),
            max_query_len=max(counts),
        )

    def packed(self, tensors: list[torch.Tensor], spans: list[tuple[int, int]]) -> torch.Tensor:
        """[tokens, heads, dim], strided as it comes from a model: heads before tokens in memory."""
        whole = torch.cat([tensor[first:end] for tensor, (first, end) in zip(tensors, spans, strict=True)])
        return whole.transpose(0, 1).contiguous().transpose(0, 1).to(self.device)

    def compute(self, backend: AttentionBackend) -> torch.Tensor:
        """The step's output, after an earlier step that put the past into the cache."""
        backend.allocate(self.num_blocks)
        for cache in (*backend._k_cache, *backend._v_cache):  # type: ignore[attr-defined]
            cache.fill_(float("nan"))
        output = torch.empty(0)
        now = [(past, past + new) for past, new in self.problem.sequences]
        for spans in ([(0, past) for past, _ in self.problem.sequences], now):
            if any(end > first for first, end in spans):
                output = backend.forward(
                    0,
                    self.packed(self.query, spans),
                    self.packed(self.key, spans),
                    self.packed(self.value, spans),
                    self.metadata(spans),
                    scale=self.scale,
                    softcap=self.problem.softcap,
                    sinks=None if self.sinks is None else self.sinks.to(self.device),
                )
        return output.cpu()

    def expected(self) -> torch.Tensor:
        """Attention as the textbook has it, one query head at a time."""
        p = self.problem
        outputs = []
        for (past, _), query, key, value in zip(p.sequences, self.query, self.key, self.value, strict=True):
            q, k, v = query.double(), key.double(), value.double()
            distance = torch.arange(len(q))[:, None] - torch.arange(len(q))[None, :]
            seen = (distance >= 0) & (distance < (p.window or len(q)))
            heads = []
            for head in range(self.heads):
                scores = q[:, head] @ k[:, head // p.group].T * self.scale
                if p.softcap:
                    scores = p.softcap * torch.tanh(scores / p.softcap)
                weights = scores.exp() * seen
                total = weights.sum(-1, keepdim=True)
                if self.sinks is not None:
                    total = total + self.sinks[head].double().exp()
                heads.append(weights / total @ v[:, head // p.group])
            outputs.append(torch.stack(heads, dim=1)[past:])
        return torch.cat(outputs)
