"""`PaddedEncoder`: texts padded to a few shapes, for devices whose compilers need all shapes in advance.

texts of 20, 30 and 50 tokens    [32 of 32 rows: 20, 30, 0, ...] and [1 row of 64: 50]
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Final, Unpack

import torch
from torch import nn
from transformers import PreTrainedModel

from headrace_engine.runner.contracts import PoolingInput
from headrace_engine.runner.pooling.encoders import AttentionOptions, OwnAttention, Positions, options_of, token_types
from headrace_engine.runner.static.compiler_backend import CompilerBackend
from headrace_engine.runner.static.warm_up import warm_up

Shape = tuple[int, int]
"""Rows, and the tokens of each."""
_SHORTEST: Final = 32
_INDEX: Final = torch.int32
"""Neuron computes wrong results with indices of 64 bits."""


class PaddedAttention(OwnAttention):
    """Attention over padded texts [rows, heads, tokens, dim], in plain operators. Scores are float32."""

    is_compiled = True
    lengths: torch.Tensor
    """The number of tokens of each row."""

    def compute(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **options: Unpack[AttentionOptions],
    ) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        if group > 1:
            key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = query.float() @ key.float().transpose(2, 3) * options["scale"]
        if options["softcap"] is not None:
            scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        # a row without tokens stays finite: NaN would spread from padding through products with 0
        scores = torch.where(self._seen(query.shape[2], options), scores, torch.finfo(torch.float32).min)
        return (scores.softmax(-1).to(value.dtype) @ value).transpose(1, 2)

    def _seen(self, length: int, options: AttentionOptions) -> torch.Tensor:
        """Return which keys a query sees, [rows, 1, queries, keys]."""
        positions = torch.arange(length, dtype=_INDEX, device=self.lengths.device)
        distance = positions[:, None] - positions
        seen = positions < self.lengths[:, None, None]
        if not options["both_ways"]:
            seen = seen & (distance >= 0)
        if options["window"] is not None:
            seen = seen & (distance.abs() < options["window"])
        return seen[:, None]


class _Step(nn.Module):
    """One step of a fixed shape, as a compiler takes it."""

    def __init__(self, base: PreTrainedModel, attention: PaddedAttention, first_position: int) -> None:
        super().__init__()
        self._base = base
        self._attention = attention
        self._first_position = first_position
        self._takes = frozenset(options_of(base, position_ids=1, token_type_ids=1, use_cache=1))

    def forward(
        self, ids: torch.Tensor, types: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._attention.lengths = lengths
        first, (rows, length) = self._first_position, ids.shape
        positions = torch.arange(first, first + length, dtype=_INDEX, device=ids.device).expand(rows, length)
        options = {"position_ids": positions, "token_type_ids": types, "use_cache": False}
        taken = {name: option for name, option in options.items() if name in self._takes}
        return self._base(input_ids=ids, attention_mask=None, **taken).last_hidden_state, lengths


class PaddedEncoder:
    """Runs a model whose attention function is `attention.attend`.

    Args:
        max_tokens: the longest text.
        step_tokens: the most tokens of a step, padding included. A longer text is a step of its own.
    """

    name = "padded"

    def __init__(
        self,
        attention: PaddedAttention,
        compiler_backend: CompilerBackend,
        max_tokens: int,
        step_tokens: int,
    ) -> None:
        self.attention = attention
        self._compiler_backend = compiler_backend
        self._lengths = _lengths(max_tokens)
        self._step_tokens = step_tokens

    def shapes(self) -> list[Shape]:
        """Return all shapes: for each length as many rows as fit into a step, and one row."""
        return [(rows, length) for length in self._lengths for rows in sorted({1, self._most_rows(length)})]

    def use(self, base: PreTrainedModel, positions: Positions) -> None:
        """Set the model, which is on the device, and compile all shapes."""
        self._step = self._compiler_backend.compile(_Step(base, self.attention, positions.first), len(self.shapes()))
        one = PoolingInput(token_ids=[0])
        warm_up(self._compiler_backend, self.shapes(), lambda shape: self._run([one], shape, sealed=False))

    def __call__(self, inputs: Sequence[PoolingInput]) -> torch.Tensor:
        by_length: dict[int, list[int]] = {}
        for index, one in enumerate(inputs):
            by_length.setdefault(self._padded_length(len(one.token_ids)), []).append(index)
        found: dict[int, torch.Tensor] = {}
        for length, indices in by_length.items():
            most = self._most_rows(length)
            for first in range(0, len(indices), most):
                part = indices[first : first + most]
                rows = self._run(
                    [inputs[index] for index in part], (1 if len(part) == 1 else most, length), sealed=True
                )
                found.update((i, row[: len(inputs[i].token_ids)]) for i, row in zip(part, rows, strict=False))
        return torch.cat([found[index] for index in range(len(inputs))])

    def _padded_length(self, length: int) -> int:
        return next(padded for padded in self._lengths if padded >= length)

    def _most_rows(self, length: int) -> int:
        return max(1, self._step_tokens // length)

    def _run(self, inputs: Sequence[PoolingInput], shape: Shape, *, sealed: bool) -> torch.Tensor:
        """Return the hidden states [rows, tokens, size] on the CPU, padding included."""
        ids, types = torch.zeros(2, *shape, dtype=_INDEX)
        lengths = torch.zeros(shape[0], dtype=_INDEX)
        for row, one in enumerate(inputs):
            lengths[row] = count = len(one.token_ids)
            ids[row, :count] = torch.tensor(one.token_ids)
            types[row, :count] = token_types([one])
        device = self._compiler_backend.device
        with self._compiler_backend.sealed() if sealed else nullcontext():
            hidden, _ = self._step(ids.to(device), types.to(device), lengths.to(device))
        return self._compiler_backend.to_host(hidden)


def _lengths(max_tokens: int) -> list[int]:
    """Return powers of two from `_SHORTEST` on, and last the longest text."""
    found = []
    length = _SHORTEST
    while length < max_tokens:
        found.append(length)
        length *= 2
    return [*found, max_tokens]
