"""The static step in plain PyTorch: a decoder of the Llama family with paged K/V memory and its sampler.

Everything that depends on values happens on the host (`shapes.py`). Here all shapes follow from the shapes of the
inputs. K/V of all tokens are written before any token attends. So one rule covers chunked prefill, prefix caching and
decoding: a token sees every position up to its own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from headrace_engine.runner.sampling.graph_sampling import draw

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Sums a tensor over the ranks of a tensor-parallel group."""

_MASKED = -1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """The parts of the architecture of a model that this module needs."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    """For each layer: how many positions a token sees, including itself. None: all."""
    norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Whether queries and keys are normalised before they are rotated (Qwen3)."""


class RMSNorm(nn.Module):
    """Root mean square normalisation (Zhang, Sennrich 2019), in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return self.weight * wide.to(x.dtype)


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The cache slots and the visible positions of the tokens of a step, for all layers."""

    blocks: torch.Tensor
    """[rows * tokens] int32; 0, the null block, for padding"""
    offsets: torch.Tensor
    """[rows * tokens] int32, within the block"""
    table: torch.Tensor
    """[rows * context blocks] int32"""
    cos: torch.Tensor
    """[rows, tokens, 1, head_dim]"""
    sin: torch.Tensor
    masks: dict[int | None, torch.Tensor]
    """Window -> the positions that a token sees, [rows, 1, 1, tokens, context] bool."""


class Attention(nn.Module):
    """Grouped-query attention over paged K/V memory."""

    k_cache: torch.Tensor
    """[blocks, block_size, kv_heads, head_dim]"""
    v_cache: torch.Tensor

    def __init__(self, spec: DecoderSpec, window: int | None, num_ranks: int, reduce: Reduce | None) -> None:
        super().__init__()
        self._dim = spec.head_dim
        self._num_kv_heads = spec.num_kv_heads // num_ranks
        self._group = spec.num_heads // spec.num_kv_heads
        self._window = window
        self._reduce = reduce
        query, kv = self._num_kv_heads * self._group * self._dim, self._num_kv_heads * self._dim
        self.q_proj = nn.Linear(spec.hidden_size, query, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(spec.hidden_size, kv, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(spec.hidden_size, kv, bias=spec.qkv_bias)
        self.o_proj = RowLinear(query, spec.hidden_size, spec.output_bias, reduce)
        if spec.qk_norm:
            self.q_norm = RMSNorm(self._dim, spec.norm_eps)
            self.k_norm = RMSNorm(self._dim, spec.norm_eps)
        self._has_norm = spec.qk_norm

    def forward(self, x: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
        rows, tokens, _ = x.shape
        query = self.q_proj(x).view(rows, tokens, -1, self._dim)
        key = self.k_proj(x).view(rows, tokens, -1, self._dim)
        value = self.v_proj(x).view(rows, tokens, -1, self._dim)
        if self._has_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = _rotate(query, inputs), _rotate(key, inputs)
        slots = (inputs.blocks, inputs.offsets)
        self.k_cache.index_put_(slots, key.flatten(0, 1))
        self.v_cache.index_put_(slots, value.flatten(0, 1))
        keys, values = self._read(self.k_cache, inputs, rows), self._read(self.v_cache, inputs, rows)

        # [rows, kv_heads, group, tokens, dim] x [rows, kv_heads, 1, dim, context]
        grouped = query.view(rows, tokens, self._num_kv_heads, self._group, self._dim).permute(0, 2, 3, 1, 4)
        scores = (grouped @ keys.transpose(-1, -2)).float() * self._dim**-0.5
        scores = torch.where(inputs.masks[self._window], scores, _MASKED)
        output = torch.softmax(scores, dim=-1).to(x.dtype) @ values
        projected: torch.Tensor = self.o_proj(output.permute(0, 3, 1, 2, 4).reshape(rows, tokens, -1))
        return projected

    def _read(self, cache: torch.Tensor, inputs: AttentionInputs, rows: int) -> torch.Tensor:
        """Return keys or values of the context, [rows, kv_heads, 1, context, dim]."""
        found = cache.index_select(0, inputs.table)
        return found.view(rows, -1, self._num_kv_heads, self._dim).transpose(1, 2)[:, :, None]


class RowLinear(nn.Module):
    """A linear layer whose input features are divided among the ranks. The bias is added once, after the sum."""

    def __init__(self, in_features: int, out_features: int, bias: bool, reduce: Reduce | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self._reduce = reduce

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._reduce is None:
            return functional.linear(x, self.weight, self.bias)
        total = self._reduce(functional.linear(x, self.weight))
        return total if self.bias is None else total + self.bias


class MLP(nn.Module):
    """Gated feed-forward network with SiLU."""

    def __init__(self, spec: DecoderSpec, num_ranks: int, reduce: Reduce | None) -> None:
        super().__init__()
        size = spec.intermediate_size // num_ranks
        self.gate_proj = nn.Linear(spec.hidden_size, size, bias=spec.mlp_bias)
        self.up_proj = nn.Linear(spec.hidden_size, size, bias=spec.mlp_bias)
        self.down_proj = RowLinear(size, spec.hidden_size, spec.mlp_bias, reduce)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class Layer(nn.Module):
    def __init__(self, spec: DecoderSpec, window: int | None, num_ranks: int, reduce: Reduce | None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.self_attn = Attention(spec, window, num_ranks, reduce)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.mlp = MLP(spec, num_ranks, reduce)

    def forward(self, x: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), inputs)
        output: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class Trunk(nn.Module):
    """The modules under `model.` in a checkpoint."""

    def __init__(self, spec: DecoderSpec, num_ranks: int, reduce: Reduce | None) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(Layer(spec, window, num_ranks, reduce) for window in spec.windows)
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps)


class StaticDecoder(nn.Module):
    """One step of the model. Its parameters have the names of the checkpoint.

    Args:
        num_ranks: number of ranks among which heads and feed-forward features are divided.
        reduce: sums over the ranks; None for one rank.
    """

    cos: torch.Tensor
    """[positions, head_dim]: a table, because devices are inaccurate for the sine of large numbers."""
    sin: torch.Tensor

    def __init__(self, spec: DecoderSpec, num_ranks: int = 1, reduce: Reduce | None = None) -> None:
        super().__init__()
        self._windows = sorted(set(spec.windows), key=lambda window: window or 0)
        self.model = Trunk(spec, num_ranks, reduce)
        self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> None:
        """Allocate K/V memory, one tensor for each layer. With a single tensor, every layer would copy all of it."""
        for layer in self.model.layers:
            attention = layer.self_attn
            assert isinstance(attention, Attention)
            weight = attention.k_proj.weight
            shape = (num_blocks, block_size, attention._num_kv_heads, attention._dim)
            attention.register_buffer("k_cache", torch.zeros(shape, dtype=weight.dtype, device=device), False)
            attention.register_buffer("v_cache", torch.zeros(shape, dtype=weight.dtype, device=device), False)

    def forward(
        self, tokens: torch.Tensor, rows: torch.Tensor, sampling_values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute one step.

        Args:
            tokens: [4, rows, tokens] int32: token ids, positions, blocks and offsets where K/V are written.
            rows: [rows, 2 + blocks] int32: index of the last token, top_k, block table.
            sampling_values: [rows, NUM_SAMPLING_VALUES] float32, see `graph_sampling.py`.

        Returns:
            [2, rows] int32: the tokens drawn, and whether each is exact; and the logits, [rows, vocabulary] float32.
        """
        positions = tokens[1]
        num_rows, num_tokens = positions.shape
        table = rows[:, 2:]
        inputs = AttentionInputs(
            blocks=tokens[2].reshape(-1),
            offsets=tokens[3].reshape(-1),
            table=table.reshape(-1),
            cos=self.cos.index_select(0, positions.reshape(-1)).view(num_rows, num_tokens, 1, -1),
            sin=self.sin.index_select(0, positions.reshape(-1)).view(num_rows, num_tokens, 1, -1),
            masks=self._masks(positions, table.shape[1]),
        )
        hidden = self.model.embed_tokens(tokens[0])
        for layer in self.model.layers:
            hidden = layer(hidden, inputs)
        # there is either one row (a chunk of one request) or one token in each row
        last = hidden[:, 0] if num_tokens == 1 else hidden[0].index_select(0, rows[:, 0])
        logits = self.lm_head(self.model.norm(last)).float()
        drawn = draw(logits, sampling_values, rows[:, 1])
        return torch.stack([drawn.tokens, drawn.is_exact]), logits

    def _masks(self, positions: torch.Tensor, num_blocks: int) -> dict[int | None, torch.Tensor]:
        attention = self.model.layers[0].self_attn
        assert isinstance(attention, Attention)
        context = num_blocks * attention.k_cache.shape[1]
        keys = torch.arange(context, device=positions.device, dtype=torch.int32)
        own = positions[:, None, None, :, None]
        causal = keys <= own
        return {window: causal if window is None else causal & (keys > own - window) for window in self._windows}


def _rotate(x: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
    """Rotary position embedding (Su et al. 2021), halves layout: x [rows, tokens, heads, dim]."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * inputs.cos + rotated * inputs.sin
