"""Replaces decoder layers of a model by fused ones, after a check that each computes the same.

The code knows no names of architectures. It runs a layer with the usual parts and its replacement on a few tokens,
including attention. The layer is replaced if both results are equal up to rounding.
"""

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from headrace_engine.runner.fused.decoder_layer import FusedDecoderLayer, unsupported_reason
from headrace_engine.runner.fused.layer_parts import ChildCall, gate_of, has_groups, parts_of
from headrace_engine.runner.fused.rotation import Rotation, RotationRecorder
from headrace_engine.runner.linear.packed_linear import PackedLinear
from headrace_engine.runner.linear.prepared_linear import LinearKind
from headrace_engine.runner.memory import release_unused

logger = logging.getLogger(__name__)

_REPORT_SECONDS = 5.0
_PROBE_TOKENS = 12
# Maximum relative error of what a layer adds to the residual stream. A missing or different part causes a much larger
# error, and another order of rounding a much smaller one.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.04}


@dataclass(slots=True)
class _Seen:
    """Inputs and outputs of one layer in the probe run."""

    given: torch.Tensor
    hidden: torch.Tensor
    """A copy of `given`."""
    position_embeddings: Any
    rotation: Rotation | None
    """Makes `position_embeddings`."""
    output: torch.Tensor | None = None
    calls: list[ChildCall] = field(default_factory=list)
    """Of the children of the layer."""
    options: list[dict[str, Any]] = field(default_factory=list)


@torch.inference_mode()
def fuse_decoder_layers(
    model: PreTrainedModel,
    max_model_len: int,
    keep: Collection[nn.Module] = (),
    linear: LinearKind = PackedLinear,
) -> int:
    """Replace the layers that can be fused. Return their number.

    Args:
        model: on its final device, with its original linear layers. No other model may use its registered attention
            function, since a probe replaces that for a moment.
        keep: linear layers whose weights the code of the model reads.
        linear: the class of the projections of fused layers.
    """
    layers = decoder_layers(model)
    if layers is None:
        return 0
    candidates = {
        index: layer
        for index, layer in enumerate(layers)
        if unsupported_reason(layer) is None and not any(module in keep for module in layer.modules())
    }
    if not candidates:
        return 0
    seen = _probe(model, candidates, max_model_len)
    in_chain = len(seen) == len(layers) and _is_chain([seen[index] for index in range(len(layers))])
    several_rotations = len({id(each.position_embeddings) for each in seen.values()}) > 1
    name: str = model.config._attn_implementation
    attend = AttentionInterface._global_mapping[name]
    tried, count, reported = len(candidates), 0, time.monotonic()
    while candidates:
        index, layer = candidates.popitem()
        own = seen.pop(index, None)
        fused = _verified(layer, own, model.dtype, linear)
        if fused is not None and own is not None:
            fused.strip()
            fused.attend = attend
            fused.rotation = own.rotation if several_rotations else None
            fused.in_chain = in_chain and several_rotations == (fused.rotation is not None)
            layers[index] = fused
            count += 1
        del layer, own
        release_unused()  # otherwise original weights would accumulate next to the merged ones
        if time.monotonic() - reported >= _REPORT_SECONDS:
            reported = time.monotonic()
            logger.info("prepared %d of %d decoder layers", tried - len(candidates), tried)
    if count < tried:
        logger.info("%d of %d decoder layers cannot be fused and are kept", tried - count, tried)
    return count


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList | None:
    """Return the list of decoder layers of a model, or None if it has no such list."""
    found = getattr(model.get_decoder(), "layers", None)
    return found if isinstance(found, nn.ModuleList) else None


def _is_chain(seen: Sequence[_Seen]) -> bool:
    outputs = ((one.output, following.hidden) for one, following in pairwise(seen))
    return all(output is not None and torch.equal(output, hidden) for output, hidden in outputs)


def _probe(model: PreTrainedModel, candidates: dict[int, nn.Module], max_model_len: int) -> dict[int, _Seen]:
    """Run the model on a few tokens and record the inputs and outputs of each candidate.

    Positions reach to the end of the context, so that behaviour specific to late positions shows too.
    """
    seen: dict[int, _Seen] = {}
    by_attention: dict[nn.Module, int] = {}
    hooks: list[Any] = []
    recorder = RotationRecorder(getattr(model.get_decoder(), "rotary_emb", None))

    def before(index: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            tables = kwargs.get("position_embeddings")
            seen[index] = _Seen(hidden, hidden.clone(), tables, recorder.rotation_of(tables))

        return hook

    def after(index: int) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            seen[index].output = output.clone() if isinstance(output, torch.Tensor) else None

        return hook

    def after_child(index: int) -> Any:
        def hook(child: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            given: Any = args[0] if args else kwargs.get("hidden_states")
            output = output[0] if isinstance(output, tuple) else output
            seen[index].calls.append(ChildCall(child, given, output))

        return hook

    def attend(module: nn.Module, query: Any, key: Any, value: Any, mask: Any = None, **options: Any) -> Any:
        if module in by_attention:
            seen[by_attention[module]].options.append(options)
        return _plain_attention(module, query, key, value, mask, **options)

    for index, layer in candidates.items():
        attention: Any = layer.self_attn
        by_attention[attention] = index
        hooks += [
            layer.register_forward_pre_hook(before(index), with_kwargs=True),
            layer.register_forward_hook(after(index)),
            *(child.register_forward_hook(after_child(index), with_kwargs=True) for child in layer.children()),
        ]
    name: str = model.config._attn_implementation
    own = AttentionInterface._global_mapping[name]
    AttentionInterface.register(name, attend)
    try:
        token_ids, positions = probe_tokens(model, max_model_len)
        model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
    finally:
        AttentionInterface.register(name, own)
        for hook in (*hooks, recorder):
            hook.remove()
    return seen


def probe_tokens(model: PreTrainedModel, max_model_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and positions [tokens] for a probe run. Positions reach to the end of the context."""
    vocab_size: int = model.config.get_text_config().vocab_size
    token_ids = torch.arange(_PROBE_TOKENS, device=model.device) * 7919 % vocab_size
    return token_ids, torch.linspace(0, max_model_len - 1, _PROBE_TOKENS).long().to(model.device)


def _plain_attention(
    _module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: Any = None,
    *,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention over one sequence. Both the layer and its replacement use it, so it needs no windows."""
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.transpose(1, 2).contiguous(), None


def _verified(layer: nn.Module, seen: _Seen | None, dtype: torch.dtype, linear: LinearKind) -> FusedDecoderLayer | None:
    """Return a fused layer that computes the same as the layer, or None."""
    if seen is None or seen.output is None or len(seen.options) != 1:
        return None
    try:
        parts = parts_of(layer, seen.given, seen.calls)
        if parts is None or parts.attention.call.module is not layer.self_attn:
            return None
        gate = gate_of(parts.mlp.call, differs)
        for with_rope in (True, False) if seen.position_embeddings is not None else (False,):
            make = partial(FusedDecoderLayer, parts, _constant(seen.options[0]), with_rope=with_rope, gate=gate)
            fused = make(linear=linear if linear.exact else PackedLinear)
            fused.attend = _plain_attention
            if _computes_the_same(fused, parts.attention.call, seen, dtype):
                return fused if linear.exact else make(linear=linear)
    except (RuntimeError, TypeError, ValueError) as error:  # the parts do not fit together in this way
        logger.debug("a decoder layer cannot be fused: %s", error)
    return None


def _computes_the_same(fused: FusedDecoderLayer, attention: ChildCall, seen: _Seen, dtype: torch.dtype) -> bool:
    assert seen.output is not None
    found = fused.attention_block(attention.given[0].contiguous(), seen.position_embeddings)
    output = fused(seen.hidden.clone(), position_embeddings=seen.position_embeddings)
    # Inputs that were not rounded to bfloat16 before become other integers.
    slack = 2.0 if has_groups(attention.module) else 1.0
    return not (
        differs(found, attention.output.reshape(found.shape), dtype, slack)
        or differs(output - seen.hidden, seen.output - seen.hidden, dtype, slack)
    )


def _constant(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that do not depend on the step."""
    return {name: value for name, value in options.items() if name not in ("position_ids", "cache_position", "dropout")}


def differs(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype, slack: float = 1.0) -> bool:
    """Whether two results differ by more than rounding, or by more than `slack` times as much."""
    error = (one.float() - other.float()).norm() / other.float().norm()
    return not bool(error < slack * _TOLERANCE[dtype])  # true for NaN too
