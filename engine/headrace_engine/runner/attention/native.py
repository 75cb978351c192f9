"""Paged attention by the compiled kernel `paged_attention.c`, called through ctypes.

Where the kernel cannot be built or does not fit the model, `unsupported_reason` says why.
"""

import ctypes
import functools

import torch

from headrace_engine.runner import native_library
from headrace_engine.runner.attention.backend import AttentionMetadata, AttentionSpec, LayerSpec

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_LANES = 16


class _AttentionArgs(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("dtype", "num_heads", "num_kv_heads", "k_dim", "v_dim", "block_size")),
        *((name, ctypes.c_int32) for name in ("num_sequences", "num_threads", "max_blocks", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        *((name, ctypes.c_int64) for name in ("query_token_stride", "query_head_stride")),
        *((name, ctypes.c_void_p) for name in ("query", "output", "k_cache", "v_cache")),
        *((name, ctypes.c_void_p) for name in ("query_start", "seq_lens", "table_rows", "block_table", "sinks")),
    )


class _WriteArgs(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("dtype", "num_tokens", "num_kv_heads", "k_dim", "v_dim", "block_size")),
        *((name, ctypes.c_int64) for name in ("key_token_stride", "key_head_stride")),
        *((name, ctypes.c_int64) for name in ("value_token_stride", "value_head_stride")),
        *((name, ctypes.c_void_p) for name in ("key", "value", "k_cache", "v_cache", "slot_mapping")),
        ("num_threads", ctypes.c_int32),
    )


class NativeBackend:
    """K memory `[blocks, kv_heads, k_dim, block_size]` and V `[blocks, kv_heads, block_size, v_dim]` a layer.

    Rows of V are padded to whole vectors; what stands in the padding is never read into a result.
    """

    name = "native"

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._library = _library()
        self._k_cache: list[torch.Tensor] = []
        self._v_cache: list[torch.Tensor] = []

    @staticmethod
    def unsupported_reason(spec: AttentionSpec) -> str | None:
        """Why the kernel cannot serve this model on this machine; None when it can."""
        if spec.dtype not in _DTYPES:
            return f"dtype {spec.dtype} is neither float32 nor bfloat16"
        if spec.block_size % _LANES:
            return f"block size {spec.block_size} is not a multiple of {_LANES} tokens"
        try:
            _library()
        except OSError as error:
            return str(error)
        return None

    @property
    def bytes_per_block(self) -> int:
        own = (layer for layer in self._spec.layers if layer.kv_source is None)
        elements = sum(layer.num_kv_heads * (layer.k_dim + _padded(layer.v_dim)) for layer in own)
        return elements * self._spec.block_size * self._spec.dtype.itemsize

    def allocate(self, num_blocks: int) -> None:
        size, dtype = self._spec.block_size, self._spec.dtype
        self._k_cache, self._v_cache = [], []
        for layer in self._spec.layers:
            if layer.kv_source is None:
                heads = (num_blocks, layer.num_kv_heads)
                # Pages are touched on first use only, so an unused budget costs no memory.
                self._k_cache.append(torch.empty((*heads, layer.k_dim, size), dtype=dtype))
                self._v_cache.append(torch.empty((*heads, size, _padded(layer.v_dim)), dtype=dtype))
            else:
                self._k_cache.append(self._k_cache[layer.kv_source])
                self._v_cache.append(self._v_cache[layer.kv_source])

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
        spec = self._spec.layers[layer]
        query = query if query.stride(-1) == 1 else query.contiguous()
        k_cache, v_cache = self._k_cache[layer].data_ptr(), self._v_cache[layer].data_ptr()
        if spec.kv_source is None:
            self._write(spec, key, value, k_cache, v_cache, metadata.slot_mapping)
        output = torch.empty((query.shape[0], spec.num_heads, spec.v_dim), dtype=query.dtype)
        sinks = None if sinks is None else sinks.float().contiguous()
        failed = self._library.headrace_attention(
            ctypes.byref(
                _AttentionArgs(
                    dtype=_DTYPES[self._spec.dtype],
                    num_heads=spec.num_heads,
                    num_kv_heads=spec.num_kv_heads,
                    k_dim=spec.k_dim,
                    v_dim=spec.v_dim,
                    block_size=self._spec.block_size,
                    num_sequences=metadata.seq_lens.shape[0],
                    num_threads=torch.get_num_threads(),
                    max_blocks=metadata.block_table.shape[1],
                    window=spec.window or 0,
                    scale=scale,
                    softcap=softcap or 0.0,
                    query_token_stride=query.stride(0),
                    query_head_stride=query.stride(1),
                    query=query.data_ptr(),
                    output=output.data_ptr(),
                    k_cache=k_cache,
                    v_cache=v_cache,
                    query_start=metadata.query_start.data_ptr(),
                    seq_lens=metadata.seq_lens.data_ptr(),
                    table_rows=metadata.table_rows.data_ptr(),
                    block_table=metadata.block_table.data_ptr(),
                    sinks=None if sinks is None else sinks.data_ptr(),
                )
            )
        )
        if failed:
            raise MemoryError("no memory for the attention kernel's scratch space")
        return output

    def _write(
        self,
        spec: LayerSpec,
        key: torch.Tensor,
        value: torch.Tensor,
        k_cache: int,
        v_cache: int,
        slot_mapping: torch.Tensor,
    ) -> None:
        key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (key, value))
        self._library.headrace_write_kv(
            ctypes.byref(
                _WriteArgs(
                    dtype=_DTYPES[self._spec.dtype],
                    num_tokens=key.shape[0],
                    num_kv_heads=spec.num_kv_heads,
                    k_dim=spec.k_dim,
                    v_dim=spec.v_dim,
                    block_size=self._spec.block_size,
                    key_token_stride=key.stride(0),
                    key_head_stride=key.stride(1),
                    value_token_stride=value.stride(0),
                    value_head_stride=value.stride(1),
                    key=key.data_ptr(),
                    value=value.data_ptr(),
                    k_cache=k_cache,
                    v_cache=v_cache,
                    slot_mapping=slot_mapping.data_ptr(),
                    num_threads=torch.get_num_threads(),
                )
            )
        )


def _padded(v_dim: int) -> int:
    return -(-v_dim // _LANES) * _LANES


@functools.cache
def _library() -> ctypes.CDLL:
    """The compiled kernel. Raises OSError, whose message says what is missing."""
    library = native_library.load("headrace_engine.runner.attention", "paged_attention.c")
    library.headrace_attention.argtypes = (ctypes.POINTER(_AttentionArgs),)
    library.headrace_attention.restype = ctypes.c_int
    library.headrace_write_kv.argtypes = (ctypes.POINTER(_WriteArgs),)
    library.headrace_write_kv.restype = None
    return library
