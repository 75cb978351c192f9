"""`ElementwiseOps` for the CPU, and other row-wise operations, by the compiled kernels of `elementwise.c`.

All tensors of a call have one type, float32 or bfloat16. They are contiguous and two-dimensional: [tokens, features].
Weights of norms are float32.
"""

import ctypes
import functools
import logging

import torch

from headrace_engine.runner.elementwise.ops import Activation, heads_together
from headrace_engine.runner.native import native_library

logger = logging.getLogger(__name__)

MAX_FEATURES = 32768
MAX_HEAD_DIM = 1024
_EXACT_GELU = 2

_int, _long, _float, _pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


@functools.cache
def library() -> ctypes.CDLL:
    """Load the compiled kernels. Raises OSError that says what is missing."""
    kernels = native_library.load("headrace_engine.runner.elementwise", "elementwise.c")
    common = (_int, _int, _long)  # type, threads, rows
    signatures = {
        "headrace_add_rms_norm": (*common, _int, _pointer, _pointer, _pointer, _float, _pointer),
        "headrace_norm_rope": (
            *(*common, _long, _int, _int, _int, _int, _int, _pointer),
            *(_pointer, _pointer, _float, _int, _pointer, _pointer),
        ),
        "headrace_add_normed": (*common, _int, _pointer, _pointer, _pointer, _float),
        "headrace_gate": (*common, _int, _int, _pointer, _pointer),
        "headrace_activate": (*common, _int, _int, _pointer, _pointer),
        "headrace_quantise_rows": (*common, _int, _pointer, _pointer, _pointer),
        "headrace_scale_rows": (*common, _int, _pointer, _pointer, _pointer, _pointer),
        "headrace_argmax": (*common, _long, _int, _pointer, _pointer),
    }
    for name, arguments in signatures.items():
        function = getattr(kernels, name)
        function.argtypes, function.restype = arguments, None
    return kernels


def is_built() -> bool:
    """Whether the kernels are available. Logs what is missing."""
    try:
        library()
    except OSError as error:
        logger.warning("the compiled elementwise kernels are not available, torch computes these operations: %s", error)
        return False
    return True


def add_rms_norm(hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `delta`, if given, to hidden in place. Return the root mean square norm (Zhang and Sennrich 2019)."""
    rows, features = hidden.shape
    out = torch.empty_like(hidden)
    library().headrace_add_rms_norm(
        native_library.DTYPES[hidden.dtype],
        torch.get_num_threads(),
        rows,
        features,
        hidden.data_ptr(),
        None if delta is None else delta.data_ptr(),
        weight.data_ptr(),
        eps,
        out.data_ptr(),
    )
    return out


def add_normed(hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Add the root mean square norm of delta to hidden, in place."""
    rows, features = hidden.shape
    library().headrace_add_normed(
        native_library.DTYPES[hidden.dtype],
        torch.get_num_threads(),
        rows,
        features,
        hidden.data_ptr(),
        delta.data_ptr(),
        weight.data_ptr(),
        eps,
    )


def norm_rope(
    qkv: torch.Tensor,
    q_heads: int,
    k_heads: int,
    head_dim: int,
    *,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cosine: torch.Tensor | None,
    sine: torch.Tensor | None,
) -> None:
    """Normalise and rotate the queries and keys at the front of each row, in place.

    Args:
        qkv: [tokens, at least (q_heads + k_heads) * head_dim].
        q_weight, k_weight: weights of norms, or None: [head_dim] for each head, or [heads * head_dim] for all together.
        cosine, sine: [tokens, rotary_dim], in halves as in transformers (Su et al. 2021), or None. Float32 or the type
            of qkv.
    """
    library().headrace_norm_rope(
        native_library.DTYPES[qkv.dtype],
        torch.get_num_threads(),
        qkv.shape[0],
        qkv.shape[1],
        q_heads,
        k_heads,
        head_dim,
        0 if cosine is None else cosine.shape[-1],
        heads_together(q_weight, k_weight, head_dim),
        qkv.data_ptr(),
        None if q_weight is None else q_weight.data_ptr(),
        None if k_weight is None else k_weight.data_ptr(),
        eps,
        0 if cosine is None else native_library.DTYPES[cosine.dtype],
        None if cosine is None else cosine.data_ptr(),
        None if sine is None else sine.data_ptr(),
    )


def gate(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """[tokens, gate | up] -> activation of gate * up, [tokens, half the features] (Shazeer 2020)."""
    rows, features = gate_up.shape
    out = torch.empty((rows, features // 2), dtype=gate_up.dtype)
    library().headrace_gate(
        native_library.DTYPES[gate_up.dtype],
        torch.get_num_threads(),
        rows,
        features // 2,
        activation,
        gate_up.data_ptr(),
        out.data_ptr(),
    )
    return out


def activate(values: torch.Tensor, activation: Activation | None) -> torch.Tensor:
    """Return the activation of each value; None: the exact GELU. [rows, features]"""
    out = torch.empty_like(values)
    library().headrace_activate(
        native_library.DTYPES[values.dtype],
        torch.get_num_threads(),
        *values.shape,
        _EXACT_GELU if activation is None else activation,
        values.data_ptr(),
        out.data_ptr(),
    )
    return out


def quantise_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row to 8 bits with a scale of its own, so that rows do not depend on each other.

    Returns:
        levels [rows, features], uint8 with 128 for zero, and scales [rows], float32: values = (levels - 128) * scale.
    """
    rows, features = values.shape
    levels = torch.empty((rows, features), dtype=torch.uint8)
    scales = torch.empty(rows, dtype=torch.float32)
    library().headrace_quantise_rows(
        native_library.DTYPES[values.dtype],
        torch.get_num_threads(),
        rows,
        features,
        values.data_ptr(),
        levels.data_ptr(),
        scales.data_ptr(),
    )
    return levels, scales


def scale_rows(
    values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return values [rows, features] * scales [rows] + bias [features], computed in float32. May overwrite values."""
    rows, features = values.shape
    out = values if dtype is torch.float32 else torch.empty((rows, features), dtype=dtype)
    library().headrace_scale_rows(
        native_library.DTYPES[dtype],
        torch.get_num_threads(),
        rows,
        features,
        values.data_ptr(),
        scales.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
    )
    return out


def argmax(values: torch.Tensor) -> torch.Tensor:
    """Return the first largest element of each row, [rows] int64. NaN counts as the largest."""
    rows, features = values.shape
    assert values.stride(1) == 1, "the elements of a row must be contiguous"
    out = torch.empty(rows, dtype=torch.int64)
    library().headrace_argmax(
        native_library.DTYPES[values.dtype],
        torch.get_num_threads(),
        rows,
        values.stride(0),
        features,
        values.data_ptr(),
        out.data_ptr(),
    )
    return out
