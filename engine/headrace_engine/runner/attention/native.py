"""Paged attention by the compiled kernel `paged_attention.c`, called through ctypes.

`unsupported_reason` says why the kernel cannot be built, or why it does not fit the model.
"""

import ctypes
import functools

import torch

from headrace_engine.runner.attention.backend import AttentionMetadata, AttentionSpec
from headrace_engine.runner.native import native_library
from headrace_engine.runner.native.huge_pages import HugePages
from headrace_engine.runner.native.native_library import check_layout

_LANES = 16


class LayerArgs(ctypes.Structure):
    """`layer_args` of paged_attention.c."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("dtype", "cache_dtype", "num_heads", "num_kv_heads", "k_dim", "v_dim")),
        *((name, ctypes.c_int32) for name in ("block_size", "window", "both_ways")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        *((name, ctypes.c_void_p) for name in ("k_cache", "v_cache", "sinks")),
    )


class StepArgs(ctypes.Structure):
    """`step_args` of paged_attention.c."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_sequences", "num_threads", "max_blocks")),
        ("attention_writes", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in ("query_token_stride", "query_head_stride")),
        *((name, ctypes.c_int64) for name in ("key_token_stride", "key_head_stride")),
        *((name, ctypes.c_int64) for name in ("value_token_stride", "value_head_stride")),
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "output")),
        *((name, ctypes.c_void_p) for name in ("query_start", "seq_lens", "table_rows", "block_table")),
        ("slot_mapping", ctypes.c_void_p),
    )

    def of(self, metadata: AttentionMetadata) -> None:
        """Point at the sequences of a step. Their tensors must outlive the call of the kernel."""
        self.num_sequences, self.max_blocks = metadata.seq_lens.shape[0], metadata.block_table.shape[1]
        self.num_threads = torch.get_num_threads()
        self.query_start, self.seq_lens = metadata.query_start.data_ptr(), metadata.seq_lens.data_ptr()
        self.table_rows, self.block_table = metadata.table_rows.data_ptr(), metadata.block_table.data_ptr()
        self.slot_mapping = metadata.slot_mapping.data_ptr()

    def take(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor) -> None:
        """Point at the tensors of a layer, whose last dimension is contiguous. They must outlive the call."""
        self.query, self.key, self.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
        self.output = output.data_ptr()
        self.query_token_stride, self.query_head_stride, _ = query.stride()
        self.key_token_stride, self.key_head_stride, _ = key.stride()
        self.value_token_stride, self.value_head_stride, _ = value.stride()


class NativeBackend:
    """The attention backend of the CPU.

    Each layer has a cache of keys, with `k_dim` elements for each token and head, and a cache of values, with `v_dim`
    elements padded to whole vectors. The layout depends on the processor, see `paged_attention.c`. Padding never
    affects a result.
    """

    name = "native"

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self.library = library()
        self._k_cache: list[torch.Tensor] = []
        self._v_cache: list[torch.Tensor] = []
        self._layers: list[LayerArgs] = []
        self._step = StepArgs()
        self._metadata: AttentionMetadata | None = None  # the step that the arguments describe

    @staticmethod
    def unsupported_reason(spec: AttentionSpec) -> str | None:
        """Return why the kernel cannot serve this model on this machine, or None if it can."""
        if spec.dtype not in native_library.DTYPES:
            return f"dtype {spec.dtype} is neither float32 nor bfloat16"
        if spec.block_size % _LANES:
            return f"block size {spec.block_size} is not a multiple of {_LANES} tokens"
        try:
            library()
        except OSError as error:
            return str(error)
        return None

    @property
    def bytes_per_block(self) -> int:
        own = (layer for layer in self._spec.layers if layer.kv_source is None)
        dtype = self._spec.dtype
        elements = sum(layer.num_kv_heads * (stored_dim(dtype, layer.k_dim) + padded(layer.v_dim)) for layer in own)
        return elements * self._spec.block_size * self._spec.stored_dtype.itemsize

    def allocate(self, num_blocks: int) -> None:
        size, dtype = self._spec.block_size, self._spec.stored_dtype
        self._k_cache, self._v_cache, self._layers = [], [], []
        pages = HugePages()
        for layer in self._spec.layers:
            if layer.kv_source is None:
                heads = (num_blocks, layer.num_kv_heads)
                # Pages become resident only on first use, so unused blocks take no memory.
                self._k_cache.append(pages.empty((*heads, stored_dim(self._spec.dtype, layer.k_dim), size), dtype))
                self._v_cache.append(pages.empty((*heads, size, padded(layer.v_dim)), dtype))
            else:
                self._k_cache.append(self._k_cache[layer.kv_source])
                self._v_cache.append(self._v_cache[layer.kv_source])
            self._layers.append(
                LayerArgs(
                    dtype=native_library.DTYPES[self._spec.dtype],
                    cache_dtype=native_library.DTYPES[dtype],
                    num_heads=layer.num_heads,
                    num_kv_heads=layer.num_kv_heads,
                    k_dim=layer.k_dim,
                    v_dim=layer.v_dim,
                    block_size=size,
                    window=layer.window or 0,
                    k_cache=self._k_cache[-1].data_ptr(),
                    v_cache=self._v_cache[-1].data_ptr(),
                )
            )

    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        spec, step = self._spec.layers[layer], self._step
        query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
        output = torch.empty((query.shape[0], spec.num_heads, spec.v_dim), dtype=query.dtype)
        sinks = None if sinks is None else sinks.float().contiguous()
        if metadata is not self._metadata:
            self._metadata = metadata
            step.of(metadata)
        step.num_tokens, step.attention_writes = query.shape[0], spec.kv_source is None
        step.take(query, key, value, output)
        own = ctypes.byref(self.layer_args(layer, scale=scale, softcap=softcap, sinks=sinks))
        if spec.kv_source is None:
            self.library.headrace_write_kv(own, ctypes.byref(step))
        if self.library.headrace_attention(own, ctypes.byref(step)):
            raise MemoryError("no memory for the scratch space of the attention kernel")
        return output

    def layer_args(self, layer: int, *, scale: float, softcap: float | None, sinks: torch.Tensor | None) -> LayerArgs:
        """Return the arguments of a layer. `sinks`, [heads] float32, must outlive the call of the kernel."""
        args = self._layers[layer]
        args.scale, args.softcap = scale, softcap or 0.0
        args.sinks = None if sinks is None else sinks.data_ptr()
        return args


def stored_dim(dtype: torch.dtype, k_dim: int) -> int:
    """Return the number of stored elements of a key, rounded up to pairs if the kernel multiplies pairs.

    Args:
        dtype: the type of queries.
    """
    pairs = dtype is torch.bfloat16 and library().headrace_attention_has_pairs()
    return k_dim + k_dim % 2 if pairs else k_dim


def padded(v_dim: int) -> int:
    """Return the number of stored elements of a value: whole vectors."""
    return -(-v_dim // _LANES) * _LANES


@functools.cache
def library() -> ctypes.CDLL:
    """Load the compiled kernel. Raises OSError that says what is missing."""
    return declared(native_library.load("headrace_engine.runner.attention", "paged_attention.c"))


def declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the functions of a library that was built from paged_attention.c. Raises LayoutError."""
    check_layout(library, "layer_args", LayerArgs)
    check_layout(library, "step_args", StepArgs)
    arguments = (ctypes.POINTER(LayerArgs), ctypes.POINTER(StepArgs))
    library.headrace_attention.argtypes, library.headrace_attention.restype = arguments, ctypes.c_int
    library.headrace_write_kv.argtypes, library.headrace_write_kv.restype = arguments, None
    return library
