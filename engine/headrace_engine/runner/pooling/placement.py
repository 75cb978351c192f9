"""Where the encoder of a pooling model is computed: on the CPU, on a GPU, or by a compiler of static shapes.

What follows the hidden states is always computed on the CPU.
"""

import logging
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from headrace_engine.errors import ConfigError
from headrace_engine.runner.attention.varlen import FlashVarlen, NativeVarlen, TorchVarlen, VarlenAttention
from headrace_engine.runner.linear import native_linear, packed_linear
from headrace_engine.runner.linear.native_linear import NativeLinear
from headrace_engine.runner.linear.packed_linear import PackedLinear
from headrace_engine.runner.linear.prepared_linear import LinearKind
from headrace_engine.runner.linear.replacement import pack_linear_layers, watch_weights
from headrace_engine.runner.memory import check_model_fits
from headrace_engine.runner.pooling.encoders import (
    CPU,
    Encoder,
    EqualLengthEncoder,
    OwnAttention,
    PackedEncoder,
    Positions,
)
from headrace_engine.runner.pooling.gelu_fusion import GeluFusion
from headrace_engine.runner.pooling.heads import Head
from headrace_engine.runner.pooling.packing_probe import PackingProbe
from headrace_engine.runner.pooling.padded_encoder import PaddedAttention, PaddedEncoder
from headrace_engine.runner.pooling.row_activations import replace_activations
from headrace_engine.runner.static.compiler_backend import CompilerBackend

logger = logging.getLogger(__name__)

_FLASH_CAPABILITY: Final = (8, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model on the CPU, with the attention of transformers."""

    model: PreTrainedModel
    base: PreTrainedModel
    """The model without its head."""
    attention: OwnAttention | None
    """What `Placement.own_attention` returned."""
    attention_name: str | None
    """The name under which transformers knows it."""
    positions: Positions
    max_tokens: int
    """The longest text."""
    probe: PackingProbe
    head: Head

    def use_own_attention(self) -> None:
        """Let the model call `attention` instead of its own attention."""
        self.model.set_attn_implementation(self.attention_name)
        self.base.set_attn_implementation(self.attention_name)

    def move_base(self, device: torch.device) -> None:
        """Move the base to a device. Its pooler stays: only the head calls it."""
        if getattr(self.base, "pooler", None) is not None:
            self.base.pooler = nn.Identity()
        module: nn.Module = self.base
        module.to(device)


class Placement(Protocol):
    """A device, and how it computes texts."""

    device: str
    """Its name in `ModelInfo`."""
    attention: str
    """The attention of packed or padded texts, for `ModelInfo` and the log."""
    computes_bfloat16: bool
    """Whether the device computes bfloat16 faster than float32."""
    dense: LinearKind | None
    """The linear layers of the head. None: those of torch."""

    def own_attention(self, kind: type[PreTrainedModel]) -> OwnAttention | None:
        """Return what replaces the attention of a model; None: nothing can. Raises ConfigError if it must."""

    def place(self, loaded: LoadedModel) -> Encoder:
        """Move the base of a model to the device. Return what computes texts with it."""

    def may_be_batch_invariant(self, encoder: Encoder) -> bool:
        """Whether no kernel of the encoder is known to let a text depend on the others."""


class CPUPlacement:
    """Texts are packed, and linear layers are replaced by faster ones."""

    device = "cpu"

    def __init__(self) -> None:
        self._varlen = _cpu_attention()
        self._linear: LinearKind | None = None
        self.attention = self._varlen.name
        self.computes_bfloat16 = packed_linear.computes_bfloat16()
        self.dense = _dense()

    def own_attention(self, kind: type[PreTrainedModel]) -> OwnAttention | None:
        return PackedEncoder(self._varlen) if kind._supports_attention_backend else None

    def place(self, loaded: LoadedModel) -> Encoder:
        base, gelus = loaded.base, GeluFusion()
        self._linear = _linear(loaded.base.dtype)
        with watch_weights(base) as keep:
            encoder = _packed_if_possible(loaded)
            with gelus.watch(base):
                loaded.probe.difference(encoder, loaded.head)
        if self._linear is NativeLinear:
            gelus.apply(base, keep)
            replace_activations(base)
        if self._linear is not None:
            pack_linear_layers(base, keep, self._linear)
        return encoder

    def may_be_batch_invariant(self, encoder: Encoder) -> bool:
        is_native = isinstance(self._varlen, NativeVarlen) and self._linear is self.dense is NativeLinear
        return is_native and isinstance(encoder, PackedEncoder)


class CUDAPlacement:
    """Texts are packed. Never run on hardware."""

    device = "cuda"
    computes_bfloat16 = True

    def __init__(self, gpu: torch.device) -> None:
        if gpu.type == "cuda" and torch.cuda.get_device_capability(gpu) < _FLASH_CAPABILITY:
            raise ConfigError("models that embed or score need a GPU of compute capability 8.0 or newer")
        self._gpu = gpu
        self._varlen = FlashVarlen()
        self.attention = self._varlen.name
        self.dense = _dense()

    def own_attention(self, kind: type[PreTrainedModel]) -> OwnAttention | None:
        return PackedEncoder(self._varlen, self._gpu) if kind._supports_attention_backend else None

    def place(self, loaded: LoadedModel) -> Encoder:
        check_model_fits(loaded.base, self._gpu)
        loaded.move_base(self._gpu)
        return _packed_if_possible(loaded, self._gpu)

    def may_be_batch_invariant(self, encoder: Encoder) -> bool:  # noqa: ARG002
        return False


class StaticPlacement:
    """Texts are padded to a few shapes.

    Args:
        step_tokens: the most tokens of a step, padding included.
    """

    attention = "padded"
    computes_bfloat16 = True
    dense: LinearKind | None = None

    def __init__(self, compiler_backend: CompilerBackend, step_tokens: int) -> None:
        compiler_backend.probe()
        self.device = compiler_backend.name
        self._compiler_backend = compiler_backend
        self._step_tokens = step_tokens

    def own_attention(self, kind: type[PreTrainedModel]) -> OwnAttention:
        if not kind._supports_attention_backend:
            raise ConfigError(f"device {self.device} cannot serve {kind.__name__}, whose attention cannot be replaced")
        return PaddedAttention()

    def place(self, loaded: LoadedModel) -> Encoder:
        attention = loaded.attention
        assert isinstance(attention, PaddedAttention)
        loaded.use_own_attention()
        loaded.move_base(self._compiler_backend.device)
        encoder = PaddedEncoder(attention, self._compiler_backend, loaded.max_tokens, self._step_tokens)
        encoder.use(loaded.base, loaded.positions)
        if attention.unknown_options:
            raise ConfigError(
                f"device {self.device} cannot serve {type(loaded.model).__name__}: its attention takes "
                f"{', '.join(sorted(attention.unknown_options))}"
            )
        return encoder

    def may_be_batch_invariant(self, encoder: Encoder) -> bool:  # noqa: ARG002
        return False


def _packed_if_possible(loaded: LoadedModel, device: torch.device = CPU) -> Encoder:
    """Return the packed encoder, or the other one if packing would change the results."""
    model, base, attention = loaded.model, loaded.base, loaded.attention
    if attention is not None:
        assert isinstance(attention, PackedEncoder)
        loaded.use_own_attention()
        attention.use(base, loaded.positions)
        reason = loaded.probe.reason_not_to_pack(attention, loaded.head, base)
        if reason is None:
            return attention
        logger.warning("%s is computed in groups of equal length: %s", type(model).__name__, reason)
    base.set_attn_implementation("sdpa" if base._supports_sdpa else "eager")
    return EqualLengthEncoder(base, device)


def _cpu_attention() -> VarlenAttention:
    try:
        return NativeVarlen()
    except OSError as error:
        logger.warning("attention is computed by torch, which is slower: %s", error)
        return TorchVarlen()


def _dense() -> LinearKind | None:
    return NativeLinear if native_linear.preferred(torch.float32) else None


def _linear(dtype: torch.dtype) -> LinearKind | None:
    if native_linear.preferred(dtype):
        return NativeLinear
    return PackedLinear if packed_linear.supports(dtype) else None
