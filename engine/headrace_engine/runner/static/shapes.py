"""The grid of shapes that a static device compiles, the choice of a shape for a step, and the padded inputs.

One function gives two families of graphs: prefill (one request, a chunk of tokens) and decode (several requests, one
token each). Each of their shapes is combined with each number of KV blocks that attention may read:

    rows    1 ........ 1    1   2   4 ... max_num_seqs
    tokens  128 .. 2048     1 ................... 1
    blocks  each of the context buckets / block_size
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from headrace_engine.errors import ConfigError, RecompilationError
from headrace_engine.options.config import EngineConfig
from headrace_engine.runner.batch import StepInputs
from headrace_engine.runner.sampling.graph_sampling import NUM_SAMPLING_VALUES, needs_host, sampling_values_of
from headrace_engine.runner.sampling.sampler import SamplingRow

_PREFILL_BUCKETS = (128, 512, 2048)
_CONTEXT_BUCKETS = (512, 2048, 8192)
# Attention over a multiple of this many positions fills the 128 memory partitions of a NeuronCore.
_PARTITIONS = 128


@dataclass(frozen=True, slots=True)
class Shape:
    """One graph: `rows` requests of `tokens` tokens each, attending to `blocks` KV blocks each."""

    rows: int
    tokens: int
    blocks: int

    @property
    def phase(self) -> Literal["prefill", "decode"]:
        return "decode" if self.tokens == 1 else "prefill"

    def __str__(self) -> str:
        return f"{self.phase} of {self.rows} x {self.tokens} tokens over {self.blocks} blocks"


class ShapeGrid:
    """All shapes that are compiled.

    Args:
        config: `config.static` has the buckets. Missing ones are chosen.
        max_model_len: maximum tokens of prompt and output.

    Raises:
        ConfigError: a bucket does not fit the other limits. The error names all such buckets.
    """

    def __init__(self, config: EngineConfig, max_model_len: int) -> None:
        given, scheduler, block_size = config.static, config.scheduler, config.cache.block_size
        longest_chunk = min(scheduler.max_num_batched_tokens, max_model_len)
        self.prefill = given.prefill_buckets or _up_to(_PREFILL_BUCKETS, longest_chunk)
        max_rows = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        self.decode = given.decode_buckets or _up_to([2**i for i in range(max_rows.bit_length())], max_rows)
        contexts = given.context_buckets or [
            -(-context // _PARTITIONS) * _PARTITIONS for context in _up_to(_CONTEXT_BUCKETS, max_model_len)
        ]
        problems = [
            f"prefill buckets must be at most max_num_batched_tokens, {scheduler.max_num_batched_tokens}, got {bucket}"
            for bucket in self.prefill
            if bucket > scheduler.max_num_batched_tokens
        ]
        problems += [
            f"decode buckets must be at most max_num_seqs, {scheduler.max_num_seqs}, got {bucket}"
            for bucket in self.decode
            if bucket > scheduler.max_num_seqs
        ]
        if contexts[-1] < max_model_len:
            problems.append(f"the largest context bucket must be at least {max_model_len}, got {contexts[-1]}")
        if problems:
            raise ConfigError("; ".join(problems))
        self.blocks = sorted({-(-context // block_size) for context in contexts})
        self._block_size = block_size

    def shapes(self) -> list[Shape]:
        """Return every shape that `choose` can return, prefill first, small before large."""
        found = [
            Shape(1, tokens, blocks)
            for shorter, tokens in zip([1, *self.prefill], self.prefill, strict=False)
            for blocks in self.blocks
            # a step of one token is a decode step; a context no longer than the next smaller bucket fits that bucket
            if tokens > 1 and blocks * self._block_size > shorter
        ]
        return found + [Shape(rows, 1, blocks) for rows in self.decode for blocks in self.blocks]

    def choose(self, num_rows: int, num_tokens: int, context: int) -> Shape:
        """Return the smallest shape for `num_rows` requests of up to `num_tokens` tokens, with up to `context`
        positions.

        Raises:
            RecompilationError: no shape is large enough. The scheduler has ignored `RunnerCapabilities`.
        """
        assert num_rows == 1 or num_tokens == 1, "prefill and decode share a step"
        blocks = _smallest(self.blocks, -(-context // self._block_size))
        if num_tokens == 1:
            return Shape(_smallest(self.decode, num_rows), 1, blocks)
        return Shape(1, _smallest(self.prefill, num_tokens), blocks)


def _up_to(buckets: Sequence[int], limit: int) -> list[int]:
    return [*(bucket for bucket in buckets if bucket < limit), limit]


def _smallest(buckets: Sequence[int], needed: int) -> int:
    for bucket in buckets:
        if bucket >= needed:
            return bucket
    raise RecompilationError(f"a step asks for {needed}, the largest bucket that is compiled holds {buckets[-1]}")


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """The arguments of `StaticDecoder.forward`, as int32 and float32 on the CPU."""

    tokens: torch.Tensor
    rows: torch.Tensor
    sampling_values: torch.Tensor


def empty_inputs(shape: Shape) -> StaticInputs:
    """Return inputs of padding only, for warm-up."""
    return StaticInputs(
        tokens=torch.zeros((4, shape.rows, shape.tokens), dtype=torch.int32),
        rows=torch.zeros((shape.rows, 2 + shape.blocks), dtype=torch.int32),
        sampling_values=torch.zeros((shape.rows, NUM_SAMPLING_VALUES), dtype=torch.float32),
    )


def pad(
    packed: StepInputs, sampling: Sequence[SamplingRow | None], shape: Shape, block_size: int, vocab_size: int
) -> StaticInputs:
    """Pad a packed batch to a shape.

    Args:
        sampling: one entry for each request of the batch, None if it gets no token in this step.
    """
    inputs = empty_inputs(shape)
    metadata = packed.metadata
    count = len(metadata.seq_lens)
    slots = metadata.slot_mapping.numpy()
    arrays = inputs.tokens.numpy()
    # either there is one row, or each row has one token: in both cases a packed batch fills the array from its start
    flat = np.stack([packed.input_ids.numpy(), packed.positions.numpy(), slots // block_size, slots % block_size])
    arrays.reshape(4, -1)[:, : flat.shape[1]] = flat
    rows = inputs.rows.numpy()
    rows[:count, 0] = np.diff(metadata.query_start.numpy()) - 1
    table = metadata.block_table.numpy()
    width = min(shape.blocks, table.shape[1])
    rows[:count, 2 : 2 + width] = table[metadata.table_rows.numpy(), :width]
    sampling_values = inputs.sampling_values.numpy()
    for index, row in enumerate(sampling):
        if row is not None and not needs_host(row):
            sampling_values[index], rows[index, 1] = sampling_values_of(row, vocab_size)
    return inputs
