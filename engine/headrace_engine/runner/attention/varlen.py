"""`VarlenAttention`: attention over whole sequences that lie in one row. Keys and values live during one call only.

lengths   [3,     2,   4      ]
tokens    [a a a  b b  c c c c]     a token sees only tokens of its own sequence
"""

import ctypes
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, Final, Protocol

import torch

from headrace_engine.errors import ConfigError
from headrace_engine.runner.attention import native
from headrace_engine.runner.attention.backend import AttentionMetadata
from headrace_engine.runner.attention.native import LayerArgs, StepArgs, padded, stored_dim
from headrace_engine.runner.native.native_library import DTYPES

_BLOCK = 32  # tokens of a block of the scratch memory
_NEEDED: Final = {"scale", "window_size", "enable_gqa"}
"""Arguments that torch's varlen_attn got after its first release."""
_LARGEST_HEAD: Final = 256


class VarlenAttention(Protocol):
    name: str

    def begin(self, lengths: Sequence[int]) -> None:
        """Set the tokens of each sequence of the next calls of `forward`, each at least 1."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        both_ways: bool,
        window: int | None,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Compute the attention of one layer.

        query [tokens, heads, k_dim], key [tokens, kv_heads, k_dim], value [tokens, kv_heads, v_dim] -> [tokens, heads,
        v_dim].

        Args:
            both_ways: a token also sees the tokens after it.
            window: a token sees only tokens that are less than this many away.
            softcap: scores become softcap * tanh(score / softcap).
        """


class NativeVarlen:
    """Calls the compiled kernel of paged attention, with blocks that all layers use in turn.

    The output of a sequence does not depend on the others, to the last bit. Raises OSError if the kernel cannot be
    built.
    """

    name = "native"

    def __init__(self) -> None:
        self._library = native.library()
        self._step = StepArgs()
        self._metadata: AttentionMetadata
        self._num_blocks = 0
        self._scratch: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    def begin(self, lengths: Sequence[int]) -> None:
        size = torch.tensor(lengths)
        blocks = (size + _BLOCK - 1) // _BLOCK
        first_block = blocks.cumsum(0) - blocks
        first_token = size.cumsum(0) - size
        self._num_blocks = int(blocks.sum())
        slots = torch.arange(int(size.sum())) + (first_block * _BLOCK - first_token).repeat_interleave(size)
        table = first_block[:, None] + torch.arange(int(blocks.max()))
        self._metadata = AttentionMetadata(
            query_start=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
            seq_lens=size.to(torch.int32),
            table_rows=torch.arange(len(lengths), dtype=torch.int32),
            block_table=table.to(torch.int32),
            slot_mapping=slots,
            max_query_len=max(lengths),
        )
        self._step.of(self._metadata)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        both_ways: bool,
        window: int | None,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
        tokens, heads, k_dim = query.shape
        kv_heads, v_dim = value.shape[1:]
        output = torch.empty((tokens, heads, v_dim), dtype=query.dtype)
        slots = self._num_blocks * _BLOCK * kv_heads
        layer = LayerArgs(
            dtype=DTYPES[query.dtype],
            cache_dtype=DTYPES[query.dtype],
            num_heads=heads,
            num_kv_heads=kv_heads,
            k_dim=k_dim,
            v_dim=v_dim,
            block_size=_BLOCK,
            window=window or 0,
            both_ways=both_ways,
            scale=scale,
            softcap=softcap or 0.0,
            k_cache=self._memory(0, slots * stored_dim(query.dtype, k_dim), query.dtype).data_ptr(),
            v_cache=self._memory(1, slots * padded(v_dim), query.dtype).data_ptr(),
        )
        self._step.num_tokens, self._step.attention_writes = tokens, True
        self._step.take(query, key, value, output)
        own, step = ctypes.byref(layer), ctypes.byref(self._step)
        self._library.headrace_write_kv(own, step)
        if self._library.headrace_attention(own, step):
            raise MemoryError("no memory for the scratch space of the attention kernel")
        return output

    def _memory(self, number: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for the keys (0) or values (1) of a layer. It is kept from call to call."""
        found = self._scratch.get((dtype, number))
        if found is None or found.numel() < elements:
            found = self._scratch[dtype, number] = torch.empty(elements, dtype=dtype)
        return found


class FlashVarlen:
    """torch's flash attention for packed sequences on a GPU. Never run on hardware.

    `TorchVarlen` computes what it does not take: float32, soft caps, and heads above 256 or no multiple of 8.
    Raises ConfigError if torch is too old.
    """

    name = "flash"

    def __init__(self) -> None:
        self._attend = _varlen_attention()
        self._others = TorchVarlen()
        self._lengths: Sequence[int] = ()
        self._starts: torch.Tensor | None = None

    def begin(self, lengths: Sequence[int]) -> None:
        self._others.begin(lengths)
        self._lengths, self._starts = lengths, None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        both_ways: bool,
        window: int | None,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        size = query.shape[-1]
        fits = size == value.shape[-1] and size % 8 == 0 and size <= _LARGEST_HEAD
        if query.dtype == torch.float32 or softcap is not None or not fits:
            return self._others.forward(
                query, key, value, both_ways=both_ways, window=window, scale=scale, softcap=softcap
            )
        if self._starts is None:
            self._starts = torch.tensor([0, *self._lengths]).cumsum(0).to(query.device, torch.int32)
        before, longest = -1 if window is None else window - 1, max(self._lengths)
        output: torch.Tensor = self._attend(
            query,
            key,
            value,
            self._starts,
            self._starts,
            longest,
            longest,
            scale=scale,
            window_size=(before, before if both_ways else 0),
            enable_gqa=key.shape[1] != query.shape[1],
        )
        return output


def _varlen_attention() -> Callable[..., Any]:
    with suppress(ImportError):
        from torch.nn.attention.varlen import varlen_attn

        attend: Callable[..., Any] = varlen_attn
        if inspect.signature(attend).parameters.keys() >= _NEEDED:
            return attend
    raise ConfigError(
        f"models that embed or score need torch 2.12 or newer on a GPU, for its varlen_attn, got {torch.__version__}"
    )


class TorchVarlen:
    """Computes one sequence after the other by torch. The reference, and for machines without a compiler."""

    name = "torch"

    def __init__(self) -> None:
        self._ends: list[int] = []

    def begin(self, lengths: Sequence[int]) -> None:
        self._ends = torch.tensor([0, *lengths]).cumsum(0).tolist()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        both_ways: bool,
        window: int | None,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        output = query.new_empty((*query.shape[:2], value.shape[-1]))
        group = query.shape[1] // key.shape[1]
        for first, end in pairwise(self._ends):
            q, k, v = (t[first:end].transpose(0, 1).float() for t in (query, key, value))
            scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            positions = torch.arange(end - first, device=query.device)
            distance = positions[:, None] - positions
            hidden = (distance.abs() if both_ways else distance) >= (window or end - first)
            if not both_ways:
                hidden |= distance < 0
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            output[first:end] = (weights @ v.repeat_interleave(group, 0)).transpose(0, 1)
        return output
