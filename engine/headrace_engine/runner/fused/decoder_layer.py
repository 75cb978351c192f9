"""`FusedDecoderLayer`: a decoder layer with merged projections and fused operations.

    [norm] -> [q|k|v] -> (head norms) rope -> paged attention -> o -> [norm] -> * scale, added
    [norm] -> [gate|up] -> activation of gate * up -> down -> [norm] -> * scale, added

Each norm may be absent. Its parts come from the transformers layer that it replaces. `fusion.py` verifies that both
compute the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headrace_engine.runner.elementwise.native_ops import MAX_FEATURES, MAX_HEAD_DIM
from headrace_engine.runner.elementwise.ops import Activation, Norm
from headrace_engine.runner.fused.layer_parts import Gate, LayerParts, Linear, is_linear
from headrace_engine.runner.fused.rotation import Rotation
from headrace_engine.runner.linear.grouped_linear import GroupedGatedLinear, GroupedLinear
from headrace_engine.runner.linear.native_linear import NativeGatedLinear, NativeLinear
from headrace_engine.runner.linear.packed_linear import PackedLinear
from headrace_engine.runner.linear.prepared_linear import (
    LinearKind,
    PreparedLinear,
    QuantisedLinear,
    mergeable,
    normalised,
)

Attend = Callable[..., tuple[torch.Tensor, Any]]
"""transformers' attention function: (module, query, key, value, mask, **options)."""

_SEPARATE = ("q_proj", "k_proj", "v_proj")
_MERGED = ("qkv_proj",)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    q_heads: int
    k_heads: int
    head_dim: int


class FusedDecoderLayer(nn.Module):
    """Replaces a decoder layer of transformers.

    Args:
        parts: of a layer without an `unsupported_reason`. They keep their modules until `strip` is called.
        options: the arguments that the layer passes to its attention function.
        with_rope: whether the layer rotates queries and keys.
        gate: the projections of a gated MLP, which is fused. None: the MLP of the layer is called.
        linear: the class of the projections. It determines the elementwise operations too.

    Raises:
        ValueError: the norms of queries and keys do not fit the heads.
    """

    attend: Attend
    in_chain = False
    """Whether each layer gets exactly the output of the previous one, and its position embeddings are known."""
    rotation: Rotation | None = None
    """Makes its position embeddings. None: all layers have the same, which the model passes."""

    def __init__(
        self,
        parts: LayerParts,
        options: dict[str, Any],
        *,
        with_rope: bool,
        gate: Gate | None,
        linear: LinearKind = PackedLinear,
    ) -> None:
        super().__init__()
        attention: Any = parts.attention.call.module
        self.attention = attention
        self.options = options
        self.ops = linear.ops
        self.with_rope = with_rope
        self.shape = attention_shape(attention)
        self.qkv = _merged(linear, *_projections(attention))
        self.o = _merged(linear, attention.o_proj)
        self.input_norm, self.mlp_norm = parts.attention.norm, parts.mlp.norm
        self.scale = parts.attention.scale
        self.attention_output_norm, self.mlp_output_norm = (
            None if branch.output_norm is None else branch.output_norm.scaled(branch.scale)
            for branch in (parts.attention, parts.mlp)
        )
        self.q_norm = Norm.of(getattr(attention, "q_norm", None))
        self.k_norm = Norm.of(getattr(attention, "k_norm", None))
        _check_head_norms(self.q_norm, self.k_norm, self.shape)
        self.mlp = parts.mlp.call.module if gate is None else None
        if gate is not None:
            self.gated = _gated(linear, gate)
            self.down = _merged(linear, gate.down)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *_: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **__: Any,
    ) -> torch.Tensor:
        """[1, tokens, hidden] -> the same shape, in place."""
        hidden = hidden_states[0]
        qkv = self.qkv.after_norm(hidden, None, self.input_norm)
        delta = self._add(hidden, self.o, self._attended(qkv, position_embeddings), self.attention_output_norm)
        delta = self._add_mlp(hidden, delta)
        if delta is not None:
            hidden += delta
        return hidden_states

    def attention_block(
        self, normed: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """Return the output of attention, [tokens, hidden], for its input of the same shape."""
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

    def _add(
        self, hidden: torch.Tensor, layer: PreparedLinear, x: torch.Tensor, norm: Norm | None
    ) -> torch.Tensor | None:
        """Add the layer of x to the residual stream, or return it for the caller to add."""
        if norm is None:
            return layer.add_to(hidden, x, self.scale)
        self.ops.add_normed(hidden, layer(x), norm.weight, norm.eps)
        return None

    def _add_mlp(self, hidden: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor | None:
        """Add `delta` to the residual stream. Add the MLP's output too, or return it for the caller to add."""
        norm, output_norm = self.mlp_norm, self.mlp_output_norm
        if self.mlp is None:
            return self._add(hidden, self.down, self.gated.after_norm(hidden, delta, norm), output_norm)
        normed = normalised(self.ops, hidden, delta, norm)
        found = self.mlp(normed[None])
        own: torch.Tensor = (
            found[0] if isinstance(found, tuple) else found
        )  # mixtures of experts return router logits too
        own = own.view(normed.shape)
        if output_norm is None:
            return own if self.scale == 1.0 else own * self.scale
        self.ops.add_normed(hidden, own, output_norm.weight, output_norm.eps)
        return None

    def strip(self) -> None:
        """Remove the original projections from the attention module, because the merged ones replace them."""
        for name in (*_projection_names(self.attention), "o_proj"):
            delattr(self.attention, name)


def _projection_names(attention: Any) -> Sequence[str]:
    return _MERGED if hasattr(attention, _MERGED[0]) else _SEPARATE


def _projections(attention: Any) -> list[Any]:
    return [getattr(attention, name, None) for name in _projection_names(attention)]


def attention_shape(attention: Any) -> AttentionShape:
    head_dim: int = attention.head_dim
    q_heads: int = attention.o_proj.in_features // head_dim
    heads = sum(layer.out_features for layer in _projections(attention)) // head_dim
    return AttentionShape(q_heads, (heads - q_heads) // 2, head_dim)


def unsupported_reason(layer: nn.Module) -> str | None:
    """Return why a layer cannot be fused, or None if it may be tried."""
    attention: Any = getattr(layer, "self_attn", None)
    if attention is None:
        return "it has no self_attn"
    names = {*_projection_names(attention), "o_proj"}
    if any(not is_linear(getattr(attention, name, None)) for name in names):
        return "its attention has other projections than q, k, v and o"
    head_dim = getattr(attention, "head_dim", None)
    if not isinstance(head_dim, int) or head_dim > MAX_HEAD_DIM:
        return "its head size is unknown or too large"
    sizes = [layer.out_features for layer in _projections(attention)]
    if sizes[1:2] != sizes[2:] or any(size % head_dim for size in sizes):
        return "its keys and values are of different sizes"
    if len(sizes) == 3 and attention.o_proj.in_features != sizes[0]:
        return "its output has another size than its queries, for example because they contain a gate"
    known = {*names, "q_norm", "k_norm"}
    if any(name not in known and list(child.parameters()) for name, child in attention.named_children()):
        return "its attention has other parts than projections and head norms"
    if _projections(attention)[0].in_features > MAX_FEATURES:
        return "its hidden size is too large"
    return None


def _check_head_norms(q_norm: Norm | None, k_norm: Norm | None, shape: AttentionShape) -> None:
    """Raise ValueError unless both are absent, of the size of a head, or of the size of all heads."""
    sizes = [0 if norm is None else len(norm.weight) for norm in (q_norm, k_norm)]
    together = [shape.q_heads * shape.head_dim, shape.k_heads * shape.head_dim]
    if sizes not in ([0, 0], [shape.head_dim, shape.head_dim], together) or (
        q_norm is not None and k_norm is not None and q_norm.eps != k_norm.eps
    ):
        raise ValueError(f"norms of {sizes} values do not fit the heads of {shape}")


class _Gated(nn.Module):
    """Merged gate and up projections, followed by activation of gate * up."""

    def __init__(self, gate_up: PreparedLinear, activation: Activation) -> None:
        super().__init__()
        self._gate_up, self._activation = gate_up, activation

    def after_norm(self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: Norm | None) -> torch.Tensor:
        return self._gate_up.ops.gate(self._gate_up.after_norm(hidden, delta, norm), self._activation)


def _gated(linear: LinearKind, gate: Gate) -> "_Gated | NativeLinear":
    layers = gate.gate_up
    if linear is not NativeLinear or any(layer.bias is not None for layer in layers):
        return _Gated(_merged(linear, *layers), gate.activation)
    grouped = [layer for layer in layers if isinstance(layer, GroupedLinear)]
    if not mergeable(layers):
        return NativeGatedLinear(torch.cat([_dense(layer) for layer in layers]), gate.activation)
    if len(grouped) == 1:
        grouped = grouped[0].halves()
    found = GroupedGatedLinear.merged(grouped, None)
    found.activation = gate.activation
    return found


def _dense(layer: Linear) -> torch.Tensor:
    """Return the weight of a layer. One in few bits is dequantised."""
    return layer.dense() if isinstance(layer, QuantisedLinear) else layer.weight


def _merged(linear: LinearKind, *layers: Linear) -> PreparedLinear:
    """Return one layer whose output is the concatenation of the outputs of `layers`.

    Layers in few bits that are not `mergeable` are dequantised.
    """
    quantised = [layer for layer in layers if isinstance(layer, QuantisedLinear)]
    if len(layers) == 1:
        return quantised[0] if quantised else linear(_dense(layers[0]), layers[0].bias)
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
    if mergeable(layers):
        return quantised[0].merged(quantised, bias)
    return linear(torch.cat([_dense(layer) for layer in layers]), bias)
