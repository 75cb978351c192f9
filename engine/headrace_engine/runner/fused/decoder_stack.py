"""`DecoderStack`: all decoder layers in one call, if native kernels compute every part of them."""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headrace_engine.runner.attention.backend import scale_of
from headrace_engine.runner.attention.native import NativeBackend, StepArgs
from headrace_engine.runner.batch import StepInputs
from headrace_engine.runner.elementwise import native_ops
from headrace_engine.runner.elementwise.ops import Norm
from headrace_engine.runner.fused.decoder_layer import FusedDecoderLayer
from headrace_engine.runner.fused.rotation import Tables
from headrace_engine.runner.linear import native_linear
from headrace_engine.runner.linear.native_linear import LinearArgs, NativeLinear
from headrace_engine.runner.native import native_library
from headrace_engine.runner.native.native_library import check_layout

_LAST_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


_KERNELS = ("linear_scratch_floats", "scratch", "linear", "norm_rope", "add_normed", "write_kv", "attention")


class _Kernels(ctypes.Structure):
    """`kernels` of decoder_layers.c."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in _KERNELS)


class _DecoderLayer(ctypes.Structure):
    """`decoder_layer` of decoder_layers.c."""

    _fields_ = (
        *((name, LinearArgs) for name in ("qkv", "o", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("attention", "q_norm", "k_norm", "o_norm", "down_norm")),
        *((name, ctypes.c_float) for name in ("head_eps", "o_eps", "down_eps")),
        *((name, ctypes.c_int32) for name in ("rotation", "heads_together", "q_heads", "k_heads", "head_dim")),
    )


class _Rotation(ctypes.Structure):
    """`rotation` of decoder_layers.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("cosine", "sine")),
        *((name, ctypes.c_int32) for name in ("dtype", "rotary_dim")),
    )

    @classmethod
    def of(cls, tables: Tables) -> "_Rotation":
        cosine, sine = tables
        return cls(cosine.data_ptr(), sine.data_ptr(), native_library.DTYPES[cosine.dtype], cosine.shape[-1])


class _DecoderStep(ctypes.Structure):
    """`decoder_step` of decoder_layers.c."""

    _fields_ = (
        ("kernels", ctypes.c_void_p),
        ("layers", ctypes.c_void_p),
        ("num_layers", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("rows", ctypes.c_int64),
        ("hidden", ctypes.c_void_p),
        ("qkv", ctypes.c_void_p),
        ("attention_output", ctypes.c_void_p),
        ("gated", ctypes.c_void_p),
        ("delta", ctypes.c_void_p),
        ("rotations", ctypes.c_void_p),
        ("attention", ctypes.c_void_p),
        ("wanted", ctypes.c_void_p),
        ("num_wanted", ctypes.c_int64),
        ("cache_bytes", ctypes.c_int64),
        ("wanted_attention", ctypes.c_void_p),
    )


class DecoderStack(nn.Module):
    """Replaces all layers in the layer list of a model.

    Args:
        layers: the result of `stackable`: all layers of the backend, in their order.
        backend: owns the K/V memory. Call `bind` after its allocation.

    Raises:
        OSError: the kernel cannot be built. The message says what is missing.
    """

    inputs: StepInputs | None = None
    """The inputs of the current step. Set before each step."""

    def __init__(self, layers: Sequence[FusedDecoderLayer], backend: NativeBackend) -> None:
        super().__init__()
        self._layers = nn.ModuleList(layers)  # they own the memory that the kernels read
        self._backend = backend
        self._shape = layers[0].shape
        self._width = max(_native(layer.down).in_features for layer in layers)
        self._needs_delta = any(layer.attention_output_norm or layer.mlp_output_norm for layer in layers)
        self._rotations = list(dict.fromkeys(layer.rotation for layer in layers if layer.rotation is not None))
        linear, attention = native_linear.library(), backend.library
        self._compute = _library().headrace_decoder_layers
        self._kernels = _Kernels(
            _address(linear.headrace_linear_scratch_floats),
            _address(linear.headrace_scratch),
            _address(linear.headrace_linear_part),
            _address(native_ops.library().headrace_norm_rope_rows),
            _address(native_ops.library().headrace_add_normed_rows),
            _address(attention.headrace_write_kv_rows),
            _address(attention.headrace_attention_part),
        )
        self._own = (_DecoderLayer * len(layers))()
        self._attention_step = StepArgs()
        self._wanted_attention = StepArgs()
        self._step = _DecoderStep(
            kernels=ctypes.addressof(self._kernels),
            layers=ctypes.addressof(self._own),
            num_layers=len(layers),
            attention=ctypes.addressof(self._attention_step),
            cache_bytes=_last_cache_bytes(),
        )

    def bind(self) -> None:
        """Take the addresses of the memory that the backend has allocated."""
        layers: Any = self._layers
        for index, (own, layer) in enumerate(zip(self._own, layers, strict=True)):
            own.qkv, own.gate_up = layer.qkv.args(layer.input_norm), layer.gated.args(layer.mlp_norm)
            own.o, own.o_norm, own.o_eps = _added(layer.o, layer.attention_output_norm, layer.scale)
            own.down, own.down_norm, own.down_eps = _added(layer.down, layer.mlp_output_norm, layer.scale)
            scale = scale_of(layer.options.get("scaling"), self._shape.head_dim)
            args = self._backend.layer_args(index, scale=scale, softcap=layer.options.get("softcap"), sinks=None)
            own.attention = ctypes.addressof(args)
            own.q_norm, own.head_eps = _address_of(layer.q_norm)
            own.k_norm, _ = _address_of(layer.k_norm)
            own.heads_together = layer.q_norm is not None and layer.q_norm.weight.shape[0] != self._shape.head_dim
            own.rotation = -1
            if layer.with_rope:
                own.rotation = 0 if layer.rotation is None else self._rotations.index(layer.rotation)
            own.q_heads, own.k_heads, own.head_dim = self._shape.q_heads, self._shape.k_heads, self._shape.head_dim

    def forward(
        self,
        hidden_states: torch.Tensor,
        *_: Any,
        position_embeddings: Tables | None = None,
        **__: Any,
    ) -> torch.Tensor:
        """[1, tokens, hidden] -> the same shape, in place.

        If only some tokens have logits in this step, the rows of the others are undefined.
        """
        shape, dtype, rows = self._shape, hidden_states.dtype, hidden_states.shape[1]
        heads = shape.q_heads + 2 * shape.k_heads
        qkv = torch.empty((rows, heads * shape.head_dim), dtype=dtype)
        attention_output = torch.empty((rows, shape.q_heads * shape.head_dim), dtype=dtype)
        gated = torch.empty((rows, self._width), dtype=dtype)
        step = self._step
        step.dtype, step.threads, step.rows = native_library.DTYPES[dtype], torch.get_num_threads(), rows
        step.hidden, step.qkv = hidden_states.data_ptr(), qkv.data_ptr()
        step.attention_output, step.gated = attention_output.data_ptr(), gated.data_ptr()
        delta = torch.empty_like(hidden_states) if self._needs_delta else None
        step.delta = None if delta is None else delta.data_ptr()
        tables = self._tables(hidden_states, position_embeddings)
        rotations = (_Rotation * len(tables))(*map(_Rotation.of, tables))
        step.rotations = ctypes.addressof(rotations)
        assert hidden_states.is_contiguous()
        self._point_attention_at(qkv, attention_output)
        if self._compute(ctypes.byref(step)):
            raise MemoryError(f"no memory to compute {rows} tokens")
        return hidden_states

    @property
    def makes_tables(self) -> bool:
        """Whether it makes the position embeddings of its layers, because they are of several kinds."""
        return bool(self._rotations)

    def _tables(self, hidden: torch.Tensor, position_embeddings: Tables | None) -> list[Tables]:
        """Return the tables of each kind of layer."""
        if not self._rotations:
            return [] if position_embeddings is None else [position_embeddings]
        assert self.inputs is not None
        return [rotation(hidden, self.inputs.positions[None]) for rotation in self._rotations]

    def _point_attention_at(self, qkv: torch.Tensor, attention_output: torch.Tensor) -> None:
        """Point the arguments of attention at `qkv` and `attention_output`, for the wanted rows of the step."""
        inputs, shape, step, attention = self.inputs, self._shape, self._step, self._attention_step
        assert inputs is not None
        attention.of(inputs.metadata)
        attention.num_tokens, attention.attention_writes = qkv.shape[0], True
        head = shape.head_dim * qkv.itemsize
        attention.query, attention.output = qkv.data_ptr(), attention_output.data_ptr()
        attention.key = qkv.data_ptr() + shape.q_heads * head
        attention.value = qkv.data_ptr() + (shape.q_heads + shape.k_heads) * head
        for name in ("query", "key", "value"):
            setattr(attention, f"{name}_token_stride", qkv.stride(0))
            setattr(attention, f"{name}_head_stride", shape.head_dim)
        if inputs.logits_start is None:
            step.wanted_attention = None
            return
        assert int(inputs.logits_start[-1]) == len(inputs.logits_indices)
        # Sequences keep their last tokens, so only the starts of their queries change. A sequence may have no queries.
        self._wanted_attention = StepArgs.from_buffer_copy(attention)
        self._wanted_attention.query_start = inputs.logits_start.data_ptr()
        step.wanted, step.num_wanted = inputs.logits_indices.data_ptr(), len(inputs.logits_indices)
        step.wanted_attention = ctypes.addressof(self._wanted_attention)


def stackable(layers: nn.ModuleList) -> list[FusedDecoderLayer]:
    """Return the layers if they have one shape and native kernels compute all their parts, otherwise an empty list."""
    fused = [layer for layer in layers if isinstance(layer, FusedDecoderLayer)]
    whole = len(fused) == len(layers) and all(
        layer.in_chain
        and layer.shape == fused[0].shape
        and all(isinstance(part, NativeLinear) for part in (layer.qkv, layer.o))
        and layer.mlp is None
        and isinstance(layer.gated, NativeLinear)
        and isinstance(layer.down, NativeLinear)
        and layer.options.get("s_aux") is None
        for layer in fused
    )
    return fused if whole else []


def _last_cache_bytes() -> int:
    """Return the size of the last-level cache, 0 if unknown. The C library may report the sum of several caches."""
    try:
        return int(_LAST_CACHE.read_text().strip().removesuffix("K")) << 10  # in KiB
    except (OSError, ValueError):
        return 0


def _native(layer: Any) -> NativeLinear:
    assert isinstance(layer, NativeLinear)
    return layer


def _address_of(norm: Norm | None) -> tuple[int | None, float]:
    return (None, 0.0) if norm is None else (norm.weight.data_ptr(), norm.eps)


def _added(layer: Any, norm: Norm | None, scale: float) -> tuple[LinearArgs, int | None, float]:
    """Return the arguments of a layer whose output is added to the residual stream, and those of its norm."""
    return layer.args(adds=scale if norm is None else None), *_address_of(norm)


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


@functools.cache
def _library() -> ctypes.CDLL:
    return declared(native_library.load("headrace_engine.runner.fused", "decoder_layers.c"))


def declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the function of a library that was built from decoder_layers.c. Raises LayoutError."""
    check_layout(library, "kernels", _Kernels)
    check_layout(library, "decoder_layer", _DecoderLayer)
    check_layout(library, "rotation", _Rotation)
    check_layout(library, "decoder_step", _DecoderStep)
    check_layout(library, "linear_args", LinearArgs)
    check_layout(library, "step_args", StepArgs)
    library.headrace_decoder_layers.argtypes = (ctypes.POINTER(_DecoderStep),)
    library.headrace_decoder_layers.restype = ctypes.c_int
    return library
