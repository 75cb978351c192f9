"""Linear layers by the compiled kernel of `linear.c`: products in float32, weights in the kernel's own panel layout.

The result of a row depends on that row only, not on the number of rows or threads: it is batch-invariant.
"""

import ctypes
import functools
import logging
import os

import torch

from headrace_engine.runner.elementwise.ops import Activation, Norm
from headrace_engine.runner.linear import packed_linear
from headrace_engine.runner.linear.prepared_linear import PreparedLinear
from headrace_engine.runner.native import native_library
from headrace_engine.runner.native.huge_pages import HugePages
from headrace_engine.runner.native.native_library import check_layout
from headrace_engine.system.openmp import spin_count

logger = logging.getLogger(__name__)

_STORE, _ADD, _ACT_AND_MUL, _GELU = 0, 1, 2, 3
_PAGES = HugePages()


class WeightSegment(ctypes.Structure):
    """`weight_segment` of linear.h."""

    _fields_ = (("strips", ctypes.c_void_p), ("format", ctypes.c_int32), ("out_features", ctypes.c_int32))


class LinearArgs(ctypes.Structure):
    """`linear_args` of linear.c."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("dtype", "threads", "spins", "result", "activation")),
        *((name, ctypes.c_int32) for name in ("in_features", "out_features", "driver", "num_segments", "input_bytes")),
        *((name, ctypes.c_int64) for name in ("rows", "x_stride", "out_stride")),
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "out", "norm_weight")),
        ("norm_eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("segments", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("upcoming", ctypes.c_void_p),
    )


class ExpertArgs(ctypes.Structure):
    """`expert_args` of linear_experts.h."""

    _fields_ = (
        *((name, LinearArgs) for name in ("gate_up", "down")),
        *((name, ctypes.c_int64) for name in ("gate_up_bytes", "down_bytes")),
        *((name, ctypes.c_int32) for name in ("num_experts", "num_chosen")),
        ("tokens", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("x", "chosen", "weights", "out")),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """Load the compiled kernel. Raises OSError that says what is missing."""
    return declared(native_library.load("headrace_engine.runner.linear", "linear.c"))


def declared(kernels: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the functions of a library that was built from linear.c. Raises LayoutError."""
    check_layout(kernels, "linear_args", LinearArgs)
    check_layout(kernels, "weight_segment", WeightSegment)
    check_layout(kernels, "expert_args", ExpertArgs)
    kernels.headrace_experts.argtypes, kernels.headrace_experts.restype = (ctypes.POINTER(ExpertArgs),), ctypes.c_int
    kernels.headrace_linear.argtypes, kernels.headrace_linear.restype = (ctypes.POINTER(LinearArgs),), ctypes.c_int
    sizes = (ctypes.c_int, ctypes.c_int, ctypes.c_int)
    kernels.headrace_packed_size.argtypes = (ctypes.c_int, *sizes)
    kernels.headrace_packed_size.restype = ctypes.c_int64
    kernels.headrace_pack_weight.argtypes = (ctypes.c_int, ctypes.c_int, *sizes, ctypes.c_void_p, ctypes.c_void_p)
    kernels.headrace_pack_weight.restype = None
    _declare_grouped(kernels)
    return kernels


def _declare_grouped(kernels: ctypes.CDLL) -> None:
    """Declare the functions of grouped_weights.h and gguf_blocks.h."""
    kernels.headrace_grouped_bytes.argtypes = (ctypes.c_int,) * 3
    kernels.headrace_grouped_bytes.restype = ctypes.c_int64
    kernels.headrace_pack_blocks.argtypes = (*(ctypes.c_int,) * 4, *(ctypes.c_void_p,) * 3)
    kernels.headrace_pack_blocks.restype = ctypes.c_int64
    pointers = (ctypes.c_void_p, ctypes.c_void_p)
    kernels.headrace_unpack_rows.argtypes = (*(ctypes.c_int,) * 4, *pointers, ctypes.c_int64, ctypes.c_void_p)
    kernels.headrace_unpack_rows.restype = None


def preferred(dtype: torch.dtype) -> bool:
    """Whether this kernel is the fastest one on this processor for weights of this type.

    Measured on processors with AVX2, AVX-512 and AMX.
    """
    capabilities = torch.cpu.get_capabilities()
    if not (capabilities.get("avx2") and capabilities.get("fma3")):
        return False
    try:
        kernels = library()
    except OSError as error:
        logger.warning("the compiled linear kernel is not available, oneDNN is used, which is slower: %s", error)
        return False
    if dtype is not torch.bfloat16:
        return True
    # The compiler may be older than the processor's bfloat16 instructions, which oneDNN uses.
    if capabilities.get("amx_bf16"):
        return bool(kernels.headrace_has_matrix_tiles())
    return bool(kernels.headrace_knows_pairs()) or not packed_linear.computes_bfloat16()


def result_of(gated: bool) -> int:
    """Return what a layer does with its sums, unless it adds them."""
    return _ACT_AND_MUL if gated else _STORE


def packed_size(dtype: torch.dtype, gated: bool, in_features: int, out_features: int) -> int:
    """Return the number of elements of a packed weight."""
    return int(library().headrace_packed_size(native_library.DTYPES[dtype], gated, in_features, out_features))


def pack_into(packed: torch.Tensor, weight: torch.Tensor, *, gated: bool) -> None:
    """Pack a contiguous weight [out_features, in_features] into panels. If `gated`, its first half is the gate."""
    out_features, in_features = weight.shape
    sizes = (native_library.DTYPES[weight.dtype], torch.get_num_threads(), gated, in_features, out_features)
    library().headrace_pack_weight(*sizes, weight.data_ptr(), packed.data_ptr())


class NativeLinear(PreparedLinear):
    """Replaces an `nn.Linear` in inference. Does not keep the original weight."""

    gated = False
    activation = Activation.SILU
    """Of the gate of a gated layer."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self.out_features, self.in_features = weight.shape
        weight = weight.detach().contiguous()
        size = packed_size(weight.dtype, self.gated, self.in_features, self.out_features)
        self._packed = _PAGES.empty((size,), weight.dtype)
        pack_into(self._packed, weight, gated=self.gated)
        self._width = self.out_features // 2 if self.gated else self.out_features
        self._dtype = weight.dtype
        self._result = result_of(self.gated)
        self.num_bytes = weight.nbytes
        self._bias = None if bias is None else bias.detach()
        self._args = LinearArgs(
            dtype=native_library.DTYPES[weight.dtype],
            spins=spin_count(os.environ),
            in_features=self.in_features,
            out_features=self.out_features,
            weight=self._packed.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        rows = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        out = self._compute(self.args(), rows)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], self._width)

    def after_norm(self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: Norm | None) -> torch.Tensor:
        """The kernel normalises its input while it copies it."""
        if delta is not None:
            hidden += delta
        return self._compute(self.args(norm), hidden)

    def add_to(self, out: torch.Tensor, x: torch.Tensor, scale: float = 1.0) -> None:
        """The kernel adds to `out` without another pass over memory."""
        self._compute(self.args(adds=scale), x, out)

    def args(self, norm: Norm | None = None, *, adds: float | None = None) -> LinearArgs:
        """Return the arguments of the kernel, except rows, threads, x and out. They need the memory of `norm`.

        `adds`: add the result to out, multiplied by this number.
        """
        args = LinearArgs.from_buffer_copy(self._own_args())
        args.result, args.activation = self._result, self.activation
        if adds is not None:
            args.result, args.scale = _ADD, adds
        if norm is not None:
            args.norm_weight, args.norm_eps = norm.weight.data_ptr(), norm.eps
        return args

    def _own_args(self) -> LinearArgs:
        return self._args

    def _compute(self, args: LinearArgs, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            out = torch.empty((x.shape[0], self._width), dtype=x.dtype)
        assert x.shape[1] == self.in_features, f"{x.shape[1]} features for a layer of {self.in_features}"
        assert x.dtype is out.dtype is self._dtype, f"{x.dtype} for a layer of {self._dtype}"
        if x.stride(-1) != 1:
            x = x.contiguous()
        args.threads, args.rows = torch.get_num_threads(), x.shape[0]
        args.x, args.x_stride = x.data_ptr(), x.stride(0)
        args.out, args.out_stride = out.data_ptr(), out.stride(0)
        if library().headrace_linear(ctypes.byref(args)):
            raise MemoryError(f"no memory for {x.shape[0]} rows of {self.in_features} input features")
        return out


class NativeGatedLinear(NativeLinear):
    """Merged gate and up projections: [rows, in_features] -> activation of gate * up, [rows, half of out_features].

    After SwiGLU and GEGLU (Shazeer 2020), without biases.
    """

    gated = True

    def __init__(self, weight: torch.Tensor, activation: Activation = Activation.SILU) -> None:
        super().__init__(weight, None)
        self.activation = activation


class NativeGeluLinear(NativeLinear):
    """A linear layer and the exact GELU after it: [..., in_features] -> [..., out_features]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self._result = _GELU
