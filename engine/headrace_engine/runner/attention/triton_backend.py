"""Paged attention by the kernels of `triton_kernels.py`: on a GPU, or in Triton's interpreter on the CPU.

The interpreter runs the same kernels with numpy, thousands of times slower, for tests. The environment variable
TRITON_INTERPRET=1 enables it, if it is set before Triton is imported.
"""

import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import torch

from headrace_engine.runner.attention.backend import AttentionMetadata, AttentionSpec, LayerSpec

_DTYPES = (torch.float32, torch.bfloat16)
_ROUNDED_DTYPES = (torch.bfloat16, torch.float8_e4m3fn)
_FP8_CAPABILITY = (8, 9)
"""The oldest GPUs for which Triton supports float8_e4m3fn: Ada Lovelace and Hopper."""
_MAX_HEAD_DIM = 256
_MIN_DOT = 16
"""The smallest side of a matrix that Triton multiplies."""
_STAGES = 3
_MAX_SPLITS = 32
_WRITE_TOKENS = 16
# Target number of programs per multiprocessor when a sequence is split, so that all multiprocessors read memory.
_PROGRAMS_PER_PROCESSOR = 2
# Bytes of keys and values in the pipeline stages of one program. Several decoding programs share the shared memory of a
# multiprocessor (228 KiB on Hopper). A prefill program may take most of it.
_DECODE_BYTES, _PREFILL_BYTES = 64 << 10, 128 << 10


@dataclass(frozen=True, slots=True)
class Launch:
    """How the work of a layer is divided into programs. It does not affect the results."""

    block_m: int
    """Rows of a program: tokens times the query heads of one K/V head."""
    tile: int
    """Keys that a program reads at a time."""
    splits: int
    num_warps: int


class TritonBackend:
    """K/V memory is `[blocks, kv_heads, block_size, k_dim or v_dim]` for each layer.

    Args:
        device: the device of queries and K/V memory. The CPU needs the interpreter.
        num_processors: multiprocessors of the device, among which long sequences are split.
    """

    name = "triton"

    def __init__(self, spec: AttentionSpec, device: torch.device, num_processors: int | None = None) -> None:
        self._spec = spec
        self._device = device
        self._num_processors = num_processors or _num_processors(device)
        self._k_cache: list[torch.Tensor] = []
        self._v_cache: list[torch.Tensor] = []

    @staticmethod
    def unsupported_reason(spec: AttentionSpec, device: torch.device) -> str | None:
        """Return why the kernels cannot serve this model on this device, or None if they can."""
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed: it comes with the extra headrace[gpu]"
        if device.type == "cpu" and not is_interpreted():
            return "Triton needs a GPU; on the CPU its kernels run for checks only, with TRITON_INTERPRET=1 set"
        if spec.dtype not in _DTYPES:
            return f"dtype {spec.dtype} is neither float32 nor bfloat16"
        if spec.stored_dtype not in (spec.dtype, *_ROUNDED_DTYPES):
            allowed = ", ".join(map(str, dict.fromkeys((spec.dtype, *_ROUNDED_DTYPES))))
            return f"the KV cache has dtype {spec.stored_dtype}, the kernels support {allowed}"
        if spec.stored_dtype is torch.float8_e4m3fn and device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            if capability < _FP8_CAPABILITY:
                return "keys and values in fp8 need compute capability {}.{}, and this GPU has {}.{}".format(
                    *_FP8_CAPABILITY, *capability
                )
        largest = max(max(layer.k_dim, layer.v_dim) for layer in spec.layers)
        if largest > _MAX_HEAD_DIM:
            return f"its head size must be at most {_MAX_HEAD_DIM}, got {largest}"
        return None

    @property
    def bytes_per_block(self) -> int:
        own = (layer for layer in self._spec.layers if layer.kv_source is None)
        elements = sum(layer.num_kv_heads * (layer.k_dim + layer.v_dim) for layer in own)
        return elements * self._spec.block_size * self._spec.stored_dtype.itemsize

    def allocate(self, num_blocks: int) -> None:
        size = self._spec.block_size
        options: dict[str, Any] = {"dtype": self._spec.stored_dtype, "device": self._device}
        self._k_cache, self._v_cache = [], []
        for layer in self._spec.layers:
            if layer.kv_source is None:
                heads = (num_blocks, layer.num_kv_heads, size)
                self._k_cache.append(torch.empty((*heads, layer.k_dim), **options))
                self._v_cache.append(torch.empty((*heads, layer.v_dim), **options))
                for cache in (self._k_cache[-1], self._v_cache[-1]):
                    cache[0].zero_()  # padding reads the null block: it must be finite
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
        from headrace_engine.runner.attention.triton_kernels import join_splits_kernel, paged_attention_kernel

        spec = self._spec.layers[layer]
        if spec.kv_source is None:
            self._write(layer, key, value, metadata.slot_mapping)
        query = query if query.stride(-1) == 1 else query.contiguous()
        num_tokens, num_seqs = query.shape[0], metadata.seq_lens.shape[0]
        group = spec.num_heads // spec.num_kv_heads
        one_token = metadata.max_query_len == 1 and num_tokens == num_seqs
        launch = self._launch(spec, num_seqs, metadata)
        block_q = launch.block_m // group
        num_blocks = num_seqs if one_token else num_tokens // block_q + num_seqs
        block_v = padded_dim(spec.v_dim)
        output = query.new_empty((num_tokens, spec.num_heads, spec.v_dim))
        parts, largest, total = (output, output, output)
        if launch.splits > 1:
            shape = (num_tokens, spec.num_heads, launch.splits)
            parts = torch.empty((*shape, block_v), dtype=torch.float32, device=query.device)
            largest, total = (torch.empty(shape, dtype=torch.float32, device=query.device) for _ in range(2))
        paged_attention_kernel[(num_blocks, spec.num_kv_heads, launch.splits)](
            parts,
            largest,
            total,
            query,
            self._k_cache[layer],
            self._v_cache[layer],
            metadata.query_start,
            metadata.seq_lens,
            metadata.table_rows,
            metadata.block_table,
            query if sinks is None else sinks.contiguous(),
            num_seqs,
            scale,
            softcap or 1.0,
            query.stride(0),
            query.stride(1),
            metadata.block_table.stride(0),
            NUM_KV_HEADS=spec.num_kv_heads,
            GROUP=group,
            K_DIM=spec.k_dim,
            V_DIM=spec.v_dim,
            BLOCK_K=padded_dim(spec.k_dim),
            BLOCK_V=block_v,
            BLOCK_SIZE=self._spec.block_size,
            BLOCK_M=launch.block_m,
            BLOCK_Q=block_q,
            TILE=launch.tile,
            SPLITS=launch.splits,
            WINDOW=spec.window or 0,
            HAS_SOFTCAP=bool(softcap),
            HAS_SINKS=sinks is not None,
            ONE_TOKEN=one_token,
            WIDEN=is_interpreted(),
            num_warps=launch.num_warps,
            num_stages=_STAGES,
        )
        if launch.splits > 1:
            join_splits_kernel[(num_tokens * spec.num_heads,)](
                output, parts, largest, total, V_DIM=spec.v_dim, BLOCK_V=block_v, SPLITS=launch.splits
            )
        return output

    def _write(self, layer: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        from headrace_engine.runner.attention.triton_kernels import write_kv_kernel

        spec = self._spec.layers[layer]
        key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (key, value))
        num_tokens = key.shape[0]
        write_kv_kernel[(-(-num_tokens // _WRITE_TOKENS), spec.num_kv_heads)](
            key,
            value,
            self._k_cache[layer],
            self._v_cache[layer],
            slot_mapping,
            num_tokens,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            NUM_KV_HEADS=spec.num_kv_heads,
            K_DIM=spec.k_dim,
            V_DIM=spec.v_dim,
            BLOCK_K=padded_dim(spec.k_dim),
            BLOCK_V=padded_dim(spec.v_dim),
            BLOCK_SIZE=self._spec.block_size,
            BLOCK_TOKENS=_WRITE_TOKENS,
        )

    def _launch(self, spec: LayerSpec, num_seqs: int, metadata: AttentionMetadata) -> Launch:
        """Plan a launch from shapes and `max_query_len` only, without reading the device.

        The sizes are not tuned. They are computed to fit a multiprocessor of Hopper.
        """
        group = spec.num_heads // spec.num_kv_heads
        min_rows = max(_MIN_DOT, _next_power_of_2(group))
        row_bytes = (padded_dim(spec.k_dim) + padded_dim(spec.v_dim)) * self._spec.dtype.itemsize * _STAGES
        if metadata.max_query_len > 1:
            # only two sizes, so that few kernels are compiled
            is_wide = metadata.max_query_len * group > 64 and row_bytes <= 512 * _STAGES
            rows = max(min_rows, 128 if is_wide else 64)
            return Launch(rows, _tile(_PREFILL_BYTES, row_bytes, 64), 1, num_warps=8 if rows >= 128 else 4)
        tile = _tile(_DECODE_BYTES, row_bytes, 64)
        programs = num_seqs * spec.num_kv_heads
        wanted = max(1, self._num_processors * _PROGRAMS_PER_PROCESSOR // programs)
        longest = metadata.block_table.shape[1] * self._spec.block_size
        splits = min(_MAX_SPLITS, wanted, max(1, longest // tile))
        return Launch(min_rows, tile, _next_power_of_2(splits + 1) // 2, num_warps=4)


def is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def padded_dim(size: int) -> int:
    """Return the size of a head in the kernels: Triton's blocks are powers of 2."""
    return max(_MIN_DOT, _next_power_of_2(size))


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _tile(budget: int, row_bytes: int, max_tile: int) -> int:
    return max(_MIN_DOT, min(max_tile, _next_power_of_2(budget // row_bytes + 1) // 2))


def _num_processors(device: torch.device) -> int:
    if device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
