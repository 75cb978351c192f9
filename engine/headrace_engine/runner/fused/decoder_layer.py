"""`FusedDecoderLayer`: a pre-norm decoder layer like Llama's, with merged projections and fused operations.

    norm -> [q|k|v] -> (head norms) rope -> paged attention -> o, added -> norm -> [gate|up] -> silu * -> down, added

Its parts come from the transformers layer that it replaces. `fusion.py` verifies that both compute the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headrace_engine.runner.elementwise.native_ops import MAX_FEATURES, MAX_HEAD_DIM
from headrace_engine.runner.elementwise.ops import Norm
from headrace_engine.runner.linear.grouped_linear import GroupedGatedLinear, GroupedLinear
from headrace_engine.runner.linear.native_linear import NativeGatedLinear, NativeLinear
from headrace_engine.runner.linear.packed_linear import PackedLinear
from headrace_engine.runner.linear.prepared_linear import LinearKind, PreparedLinear

Attend = Callable[..., tuple[torch.Tensor, Any]]
"""transformers' attention function: (module, query, key, value, mask, **options)."""

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_GATED = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class AttentionShape:
    q_heads: int
    k_heads: int
    head_dim: int


class FusedDecoderLayer(nn.Module):
    """Replaces a decoder layer of transformers.

    Args:
        layer: a layer without an `unsupported_reason`. It keeps its modules until `strip` is called.
        options: the arguments that the layer passes to its attention function.
        with_rope: whether the layer rotates queries and keys.
        with_gate: whether its MLP is a gated SiLU, which is fused. Otherwise the MLP of the layer is called.
        linear: the class of the projections. It determines the elementwise operations too.
    """

    attend: Attend
    in_chain = False
    """Whether each layer gets exactly the output of the previous one, and all get the same position embeddings."""

    def __init__(
        self,
        layer: nn.Module,
        options: dict[str, Any],
        *,
        with_rope: bool,
        with_gate: bool,
        linear: LinearKind = PackedLinear,
    ) -> None:
        super().__init__()
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        self.attention = attention
        self.options = options
        self.ops = linear.ops
        self.with_rope = with_rope
        self.shape = attention_shape(attention)
        self.qkv = _merged(linear, attention.q_proj, attention.k_proj, attention.v_proj)
        self.o = _merged(linear, attention.o_proj)
        self.input_norm = Norm.of(layer.input_layernorm)
        self.output_norm = Norm.of(layer.post_attention_layernorm)
        self.q_norm = Norm.of(getattr(attention, "q_norm", None))
        self.k_norm = Norm.of(getattr(attention, "k_norm", None))
        self.mlp = None if with_gate else mlp
        if with_gate:
            self.gated = _gated(linear, mlp.gate_proj, mlp.up_proj)
            self.down = _merged(linear, mlp.down_proj)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *_: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **__: Any,
    ) -> torch.Tensor:
        """[1, tokens, hidden] -> the same shape, in place."""
        hidden = hidden_states[0]
        assert self.input_norm is not None
        assert self.output_norm is not None
        qkv = self.qkv.after_norm(hidden, None, self.input_norm)
        delta = self.o.add_to(hidden, self._attended(qkv, position_embeddings))
        delta = self._add_mlp(hidden, delta, self.output_norm)
        if delta is not None:
            hidden += delta
        return hidden_states

    def attention_block(
        self, normed: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """Return what attention adds to the residual stream, for normalised hidden states [tokens, hidden]."""
        out: torch.Tensor = self.o(self._attended(self.qkv(normed), position_embeddings))
        return out

    def _attended(
        self, qkv: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """[tokens, queries | keys | values] -> output of the attention heads, [tokens, heads * head_dim]."""
        shape = self.shape
        cosine, sine = position_embeddings if self.with_rope and position_embeddings is not None else (None, None)
        q_norm, k_norm = self.q_norm, self.k_norm
        if cosine is not None or q_norm is not None:
            self.ops.norm_rope(
                qkv,
                shape.q_heads,
                shape.k_heads,
                shape.head_dim,
                q_weight=None if q_norm is None else q_norm.weight,
                k_weight=None if k_norm is None else k_norm.weight,
                eps=0.0 if q_norm is None else q_norm.eps,
                cosine=None if cosine is None else cosine[0],
                sine=None if sine is None else sine[0],
            )
        heads = qkv.view(1, qkv.shape[0], -1, shape.head_dim).transpose(1, 2)
        query, key, value = torch.split(heads, [shape.q_heads, shape.k_heads, shape.k_heads], dim=1)
        output, _ = self.attend(self.attention, query, key, value, None, **self.options)
        return output.reshape(qkv.shape[0], -1)

    def _add_mlp(self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: Norm) -> torch.Tensor | None:
        """Add `delta` to the residual stream. Add the MLP's output too, or return it for the caller to add."""
        if self.mlp is not None:
            normed = self.ops.add_rms_norm(hidden, delta, norm.weight, norm.eps)
            found = self.mlp(normed[None])
            own: torch.Tensor = (
                found[0] if isinstance(found, tuple) else found
            )  # mixtures of experts return router logits too
            return own.view(normed.shape)
        return self.down.add_to(hidden, self.gated.after_norm(hidden, delta, norm))

    def strip(self) -> None:
        """Remove the original projections from the attention module, because the merged ones replace them."""
        for name in PROJECTIONS:
            delattr(self.attention, name)


def attention_shape(attention: Any) -> AttentionShape:
    head_dim: int = attention.head_dim
    return AttentionShape(
        attention.q_proj.out_features // head_dim, attention.k_proj.out_features // head_dim, head_dim
    )


def unsupported_reason(layer: nn.Module) -> str | None:
    """Return why a layer cannot be fused, or None if it may be tried."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if attention is None or mlp is None:
        return "it has no self_attn and mlp"
    if any(not _is_linear(getattr(attention, name, None)) for name in PROJECTIONS):
        return "its attention has other projections than q, k, v and o"
    if not isinstance(getattr(attention, "head_dim", None), int) or attention.head_dim > MAX_HEAD_DIM:
        return "its head size is unknown or too large"
    sizes = [getattr(attention, name).out_features for name in ("q_proj", "k_proj", "v_proj")]
    if sizes[1] != sizes[2] or any(size % attention.head_dim for size in sizes):
        return "its keys and values are of different sizes"
    if any(Norm.of(getattr(layer, name, None)) is None for name in ("input_layernorm", "post_attention_layernorm")):
        return "it is not normalised before attention and before the MLP"
    own = {name for name, _ in layer.named_children()}
    if own != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return f"it has other parts: {', '.join(sorted(own))}"
    known = {*PROJECTIONS, "q_norm", "k_norm"}
    if {name for name, _ in attention.named_children()} - known:
        return "its attention has other parts than projections and head norms"
    if attention.q_proj.in_features > MAX_FEATURES:
        return "its hidden size is too large"
    return None


def _is_linear(module: object) -> bool:
    """Whether a module computes a plain linear layer, by weights that can be merged."""
    return type(module) in (nn.Linear, GroupedLinear)


def is_gated(mlp: nn.Module) -> bool:
    """Whether an MLP has the projections of a gated MLP. `fusion.py` verifies its activation by comparison."""
    parts = {name for name, child in mlp.named_children() if _is_linear(child)}
    return parts == set(_GATED)


class _Gated(nn.Module):
    """Merged gate and up projections, followed by silu(gate) * up."""

    def __init__(self, gate_up: PreparedLinear) -> None:
        super().__init__()
        self._gate_up = gate_up

    def after_norm(self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: Norm) -> torch.Tensor:
        return self._gate_up.ops.silu_mul(self._gate_up.after_norm(hidden, delta, norm))


_Linear = nn.Linear | GroupedLinear


def _gated(linear: LinearKind, gate: _Linear, up: _Linear) -> "_Gated | NativeLinear":
    if linear is NativeLinear and all(layer.bias is None for layer in (gate, up)):
        if isinstance(gate, GroupedLinear) and isinstance(up, GroupedLinear):
            return GroupedGatedLinear.merged([gate, up], None)
        return NativeGatedLinear(torch.cat([_dense(gate), _dense(up)]), None)
    return _Gated(_merged(linear, gate, up))


def _dense(layer: _Linear) -> torch.Tensor:
    """Return the weight of a layer. One in groups is dequantised."""
    return layer.dense() if isinstance(layer, GroupedLinear) else layer.weight


def _merged(linear: LinearKind, *layers: _Linear) -> PreparedLinear:
    """Return one layer whose output is the concatenation of the outputs of `layers`.

    Layers in groups share their weights with it. If only some of them are in groups, these are dequantised.
    """
    grouped = [layer for layer in layers if isinstance(layer, GroupedLinear)]
    if len(layers) == 1:
        return grouped[0] if grouped else linear(_dense(layers[0]), layers[0].bias)
    biases = [layer.bias for layer in layers]
    present = next((bias for bias in biases if bias is not None), None)
    bias = None
    if present is not None:
        bias = torch.cat(
            [
                present.new_zeros(layer.out_features) if own is None else own
                for layer, own in zip(layers, biases, strict=True)
            ]
        )
    if len(grouped) == len(layers):
        return GroupedLinear.merged(grouped, bias)
    return linear(torch.cat([_dense(layer) for layer in layers]), bias)
