"""Determines the attention layers of a loaded model by running it on a few tokens.

The code knows no names of architectures. The runs show which attention layers a forward pass calls, their shapes and
their masks. They also show whether anything other than attention passes information between tokens. A model that the
paged runner would compute wrongly is refused, with the reason.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel

from headrace_engine.errors import ModelLoadError
from headrace_engine.runner.attention.backend import LayerSpec
from headrace_engine.runner.recurrent.recurrent_layers import RecurrentLayers

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Arguments that transformers' models pass to the attention function. The backends support the first set. The second set
# has no effect on inference. Any other argument would be lost.
_HONOURED = {"scaling", "softcap", "s_aux", "sliding_window", "is_causal"}
_IRRELEVANT = {"dropout", "position_ids", "cache_position"}

_NUM_TOKENS = 6
# Rows of the second run. The embedding of row 2 is NaN. Rows 3 and 4 have the same token and position. Row 0 has the
# same token as these at another position.
_POISONED, _SAME, _OTHER = 2, (3, 4), 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    """The attention layers of a model, as its forward pass calls them."""

    layers: tuple[LayerSpec, ...]
    modules: tuple[torch.nn.Module, ...]
    """The module of each call, in order. A module may occur more than once."""
    keeps_logits: bool
    """Whether forward computes only the logits that `logits_to_keep` names."""


@dataclass(slots=True)
class _Call:
    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    options: dict[str, Any]


@dataclass(slots=True)
class _Recorder:
    """Replaces attention: every token attends to itself only."""

    calls: list[_Call] = field(default_factory=list)
    masks: list[tuple[torch.Tensor, MaskFunction]] = field(default_factory=list)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        self.calls.append(_Call(module, query, key, value, attention_mask, options))
        group = query.shape[1] // value.shape[1]
        return value.repeat_interleave(group, dim=1).transpose(1, 2).contiguous(), None

    def make_mask(
        self, batch_size: int, q_length: int, kv_length: int, *_: Any, mask_function: MaskFunction, **__: Any
    ) -> torch.Tensor:
        mask = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool)
        self.masks.append((mask, mask_function))
        return mask

    def mask_function(self, mask: torch.Tensor) -> MaskFunction | None:
        storage = mask.untyped_storage().data_ptr()
        return next((function for own, function in self.masks if own.untyped_storage().data_ptr() == storage), None)


@torch.inference_mode()
def inspect_model(model: PreTrainedModel, max_model_len: int, recurrent: RecurrentLayers | None = None) -> ModelLayout:
    """Run the model twice on a few tokens. It must have been loaded with a unique attention function.

    Args:
        recurrent: the recurrent layers of the model, if they were replaced.

    Raises:
        ModelLoadError: the paged runner cannot compute this model.
    """
    name = type(model).__name__
    try:
        recorder, keeps_logits = _run_with_masks(model, max_model_len)
        if not recorder.calls:
            raise _RefusedError("does not route its attention through transformers' attention interface")
        layers = _layers(recorder, max_model_len)
        _check_cache_keeps_what_masks_show(model, recorder.calls, layers, max_model_len)
        with recurrent.each_token_alone(_NUM_TOKENS) if recurrent is not None else nullcontext():
            poisoned, logits = _run_poisoned(model, max_model_len)
        if [call.module for call in poisoned.calls] != [call.module for call in recorder.calls]:
            raise _RefusedError("calls its attention layers in an order that depends on the input")
        _check_tokens_meet_in_attention_only(poisoned.calls, logits)
        _check_positions_are_taken(poisoned.calls)
        if recurrent is not None and (kind := recurrent.differs_in_parts()) is not None:
            raise _RefusedError(f"has layers of type {kind}, whose result depends on how a prompt is cut into steps")
    except _RefusedError as refusal:
        raise ModelLoadError(f"{name} cannot be served: it {refusal}") from None
    except Exception as error:
        raise ModelLoadError(
            f"{name} cannot compute a packed row of tokens: {type(error).__name__}: {error}"
        ) from error
    return ModelLayout(layers=layers, modules=tuple(call.module for call in recorder.calls), keeps_logits=keeps_logits)


class _RefusedError(Exception):
    """The model is refused. The message completes the sentence "<model> cannot be served: it ..."."""


def _run_with_masks(model: PreTrainedModel, max_model_len: int) -> tuple[_Recorder, bool]:
    """Run one sequence with ordinary positions, and record the masks of the model."""
    recorder = _Recorder()
    length = min(_NUM_TOKENS, max_model_len)
    kept = torch.tensor([0, length - 1])
    keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
    options = {"logits_to_keep": kept} if keeps_logits else {}
    with _standing_in(model, recorder, with_masks=True):
        logits = model(
            input_ids=_token_ids(model, range(length)),
            position_ids=torch.arange(length)[None],
            use_cache=False,
            **options,
        ).logits
    return recorder, keeps_logits and logits.shape[1] == len(kept)


def _run_poisoned(model: PreTrainedModel, max_model_len: int) -> tuple[_Recorder, torch.Tensor]:
    """Run three sequences in one row, as in a real step, with NaN as the embedding of one token."""
    recorder = _Recorder()
    far = min(9, max_model_len - 1)

    def poison(_: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[:, _POISONED] = float("nan")
        return output

    hook = model.get_input_embeddings().register_forward_hook(poison)
    try:
        with _standing_in(model, recorder, with_masks=False):
            logits: torch.Tensor = model(
                input_ids=_token_ids(model, [0, 1, 2, 0, 0, 3]),
                position_ids=torch.tensor([[0, 0, min(1, far), far, far, 0]]),
                use_cache=False,
            ).logits[0]
    finally:
        hook.remove()
    return recorder, logits


def _token_ids(model: PreTrainedModel, offsets: Any) -> torch.Tensor:
    """Return tokens from the middle of the vocabulary, which has no special tokens."""
    vocab_size: int = model.config.get_text_config().vocab_size
    return torch.tensor([[(vocab_size // 2 + offset) % vocab_size for offset in offsets]])


@contextmanager
def _standing_in(model: PreTrainedModel, recorder: _Recorder, *, with_masks: bool) -> Iterator[None]:
    name: str = model.config._attn_implementation
    attention = AttentionInterface._global_mapping[name]
    AttentionInterface.register(name, recorder.attend)
    if with_masks:
        AttentionMaskInterface.register(name, recorder.make_mask)
    try:
        yield
    finally:
        AttentionInterface.register(name, attention)
        # Without a mask function of this name transformers creates no masks, as in a real step.
        AttentionMaskInterface._global_mapping.pop(name, None)


def _layers(recorder: _Recorder, max_model_len: int) -> tuple[LayerSpec, ...]:
    windows: dict[int, int | None] = {}
    layers: list[LayerSpec] = []
    for index, call in enumerate(recorder.calls):
        _check_options(call)
        function = None if call.mask is None else recorder.mask_function(call.mask)
        if function is None:
            raise _RefusedError("computes attention masks of its own, from more than the positions of tokens")
        if id(function) not in windows:
            windows[id(function)] = _window(function, max_model_len)
        layers.append(_layer(call, windows[id(function)], _kv_source(recorder.calls, index)))
    return tuple(layers)


def _layer(call: _Call, window: int | None, kv_source: int | None) -> LayerSpec:
    _, num_heads, num_queries, k_dim = call.query.shape
    _, num_kv_heads, num_keys, _ = call.key.shape
    if num_keys != num_queries:
        raise _RefusedError(f"attends to {num_keys} keys for {num_queries} tokens: cross attention or learned keys")
    if num_heads % num_kv_heads or call.key.shape[-1] != k_dim or call.value.shape[1:3] != call.key.shape[1:3]:
        raise _RefusedError(
            f"has attention of an unknown shape: query {tuple(call.query.shape)}, key {tuple(call.key.shape)}, "
            f"value {tuple(call.value.shape)}"
        )
    return LayerSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        k_dim=k_dim,
        v_dim=call.value.shape[-1],
        window=window,
        kv_source=kv_source,
    )


def _kv_source(calls: list[_Call], index: int) -> int | None:
    """Return the first earlier call with the same key and value memory."""
    own = calls[index]
    for earlier, call in enumerate(calls[:index]):
        if _same_memory(call.key, own.key) and _same_memory(call.value, own.value):
            return earlier
    return None


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


def _check_options(call: _Call) -> None:
    in_use = (name for name, value in call.options.items() if value is not None and value is not False)
    unknown = sorted(name for name in in_use if name not in _HONOURED | _IRRELEVANT)
    if unknown:
        raise _RefusedError(f"passes {', '.join(unknown)} to its attention, which paged attention does not support")


def _window(function: MaskFunction, max_model_len: int) -> int | None:
    """Return the window of a mask: how many tokens a token sees, including itself. None: all before it.

    The mask function is evaluated. It must be causal, with at most one fixed window.
    """
    zero = torch.zeros((), dtype=torch.long)
    keys = torch.arange(max_model_len)

    def seen_from(position: int) -> torch.Tensor:
        try:
            return function(zero, zero, torch.tensor(position), keys).expand(max_model_len)
        except Exception as error:  # the mask function is foreign code: any exception means that it is not supported
            raise _RefusedError(f"has attention masks that depend on more than positions ({error})") from error

    last = max_model_len - 1
    span = int(seen_from(last).int().flip(0).cumprod(0).sum())
    window = None if span == max_model_len else span
    at = {0, 1, last // 3, last // 2, last}
    at |= {span * times + shift for times in (1, 2) for shift in (-1, 0, 1)}
    for position in sorted(p for p in at if 0 <= p <= last):
        expected = (keys <= position) & (keys > position - (window or max_model_len))
        if not torch.equal(seen_from(position), expected):
            raise _RefusedError(
                "has attention that is neither plainly causal nor a sliding window (chunked, bidirectional or prefix)"
            )
    return window


def _check_cache_keeps_what_masks_show(
    model: PreTrainedModel, calls: list[_Call], layers: tuple[LayerSpec, ...], max_model_len: int
) -> None:
    """Refuse a model whose cache drops more than its masks hide: its output would depend on the chunks."""
    kept = DynamicCache(config=model.config.get_text_config()).layers
    for call, layer in zip(calls, layers, strict=True):
        index = getattr(call.module, "layer_idx", None)
        if not isinstance(index, int) or index >= len(kept):
            continue
        forgets = getattr(kept[index], "sliding_window", None)
        if forgets is not None and forgets < (layer.window or max_model_len):
            raise _RefusedError(
                f"forgets keys after {forgets} tokens, but its attention masks show {layer.window or 'all'} of them: "
                "its output depends on how a prompt is cut into steps"
            )


def _check_tokens_meet_in_attention_only(calls: list[_Call], logits: torch.Tensor) -> None:
    """Refuse a model that passes information between tokens outside attention: NaN has spread to other tokens."""
    rows = [t[0].transpose(0, 1).flatten(1) for call in calls for t in (call.query, call.key, call.value)]
    for row in (*rows, logits):
        tainted = row.isnan().any(dim=-1).nonzero().flatten().tolist()
        if tainted != [_POISONED] and (row is logits or tainted):
            raise _RefusedError(
                "carries information from token to token outside of its attention (a recurrent or convolution layer, "
                "or attention that is not routed through the attention interface)"
            )


def _check_positions_are_taken(calls: list[_Call]) -> None:
    """Refuse a model whose queries or keys depend on the place in the row, not only on token and position."""
    for call in calls:
        for tensor in (call.query, call.key):
            rows = tensor[0].transpose(0, 1).float()
            apart = (rows[_SAME[0]] - rows[_SAME[1]]).abs().max()
            moved = (rows[_SAME[0]] - rows[_OTHER]).abs().max()
            # if only the row counted, rows 3 and 4 (one apart) would differ by a third of what rows 0 and 3 differ
            if apart > 0.02 * rows[_SAME[0]].abs().max() and apart > 0.2 * moved:
                raise _RefusedError("takes a token's place in the row for its position and ignores position_ids")
