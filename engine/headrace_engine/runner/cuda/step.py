"""Copies the inputs of a step to the device. The block table stays there."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace_engine.runner.attention.backend import AttentionMetadata
from headrace_engine.runner.batch import RunningRequest, StepInputs
from headrace_engine.runner.contracts import StepBatch
from headrace_engine.runner.cuda.device import is_gpu


class DeviceSteps:
    """Copies packed steps to the device, unchanged or padded to a number of sequences.

    The block table stays on the device. Only its changes are sent.

    Args:
        max_tokens: maximum number of tokens in a step.
        max_num_seqs: maximum number of sequences in a step.
        max_blocks: maximum number of blocks of a sequence.
    """

    def __init__(self, max_tokens: int, max_num_seqs: int, max_blocks: int, device: torch.device) -> None:
        table_size = (max_num_seqs + 1) * max_blocks
        self._buffer = UploadBuffer(
            # ids, positions, slots, rows of logits; starts, lengths, table rows; tokens in flight; changes of the table
            upload_bytes(
                *[(max_tokens, 8)] * 4,
                *[(max_num_seqs + 1, 4)] * 3,
                *[(max_num_seqs, 8)] * 2,
                *((table_size, 8), (table_size, 4)),
            ),
            device,
        )
        self._table = torch.zeros((max_num_seqs + 1, max_blocks), dtype=torch.int32, device=device)
        self._changes: list[tuple[int, list[int]]] = []
        self.drawn: torch.Tensor | None = None
        """[rows] int64 on the device: the tokens of the previous step, which the next one may include."""

    def note_blocks(self, batch: StepBatch, requests: Mapping[str, RunningRequest]) -> None:
        """Remember the new blocks of a step. Call after `requests` has been updated."""
        width = self._table.shape[1]
        for arrival in batch.new_requests:
            self._changes.append((requests[arrival.request_id].table_row * width, arrival.block_ids))
        for request_id, block_ids in batch.new_block_ids.items():
            request = requests[request_id]
            self._changes.append((request.table_row * width + request.num_blocks - len(block_ids), block_ids))

    def to_device(self, inputs: StepInputs) -> StepInputs:
        """Return the step without padding."""
        return self._send(inputs, inputs.metadata.max_query_len)

    def to_device_padded(self, inputs: StepInputs, size: int) -> StepInputs:
        """Return a step of one token for each sequence, padded to `size` sequences. Every row has logits.

        A padding row is a sequence of one token in the null block, which is never read.
        """
        metadata = inputs.metadata
        missing = size - len(metadata.seq_lens)
        pad = torch.nn.functional.pad
        padded = replace(
            inputs,
            input_ids=pad(inputs.input_ids, (0, missing)),
            positions=pad(inputs.positions, (0, missing)),
            logits_indices=torch.arange(size),
            logits_start=None,
            metadata=AttentionMetadata(
                query_start=torch.arange(size + 1, dtype=torch.int32),
                seq_lens=pad(metadata.seq_lens, (0, missing), value=1),
                table_rows=pad(metadata.table_rows, (0, missing), value=self._table.shape[0] - 1),
                block_table=metadata.block_table,
                slot_mapping=pad(metadata.slot_mapping, (0, missing)),
                max_query_len=1,
            ),
        )
        return self._send(padded, 1)

    def padding(self, size: int) -> StepInputs:
        """Return a decode step of `size` padding sequences."""
        nothing, none = torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.int32)
        metadata = AttentionMetadata(
            query_start=torch.zeros(1, dtype=torch.int32),
            seq_lens=none,
            table_rows=none,
            block_table=self._table,
            slot_mapping=nothing,
            max_query_len=1,
        )
        empty = StepInputs(
            input_ids=nothing, positions=nothing, metadata=metadata, sampled_ids=[], logits_indices=nothing
        )
        return self.to_device_padded(empty, size)

    def largest_prompt(self, num_tokens: int, max_model_len: int, num_logits: int) -> StepInputs:
        """Return a prompt of `num_tokens` tokens without cache slots, to measure the memory of a step. Triton only."""
        metadata = AttentionMetadata(
            query_start=torch.tensor([0, num_tokens], dtype=torch.int32),
            seq_lens=torch.zeros(1, dtype=torch.int32),
            table_rows=torch.zeros(1, dtype=torch.int32),
            block_table=self._table,
            slot_mapping=torch.full((num_tokens,), -1),
            max_query_len=num_tokens,
        )
        inputs = StepInputs(
            input_ids=torch.zeros(num_tokens, dtype=torch.long),
            positions=torch.arange(num_tokens) % max_model_len,
            metadata=metadata,
            sampled_ids=[],
            logits_indices=torch.arange(min(num_logits, num_tokens)),
        )
        return self.to_device(inputs)

    def _send(self, inputs: StepInputs, max_query_len: int) -> StepInputs:
        metadata = inputs.metadata
        arrays: list[npt.NDArray[Any]] = [
            tensor.numpy()
            for tensor in (
                inputs.input_ids,
                inputs.positions,
                metadata.slot_mapping,
                inputs.logits_indices,
                metadata.query_start,
                metadata.seq_lens,
                metadata.table_rows,
            )
        ]
        # These arrays come last, so that their sizes do not change the addresses of the others.
        arrays.append(np.array(list(inputs.expected), dtype=np.int64))
        arrays.append(np.array([expected.row for expected in inputs.expected.values()], dtype=np.int64))
        if self._changes:
            arrays += [
                np.concatenate([np.arange(start, start + len(ids)) for start, ids in self._changes]),
                np.concatenate([np.asarray(ids, dtype=np.int32) for _, ids in self._changes]),
            ]
            self._changes.clear()
        ids, positions, slots, logits_indices, *uploaded = self._buffer.upload(arrays)
        query_start, seq_lens, table_rows, places, rows, *changes = uploaded
        if inputs.expected:
            assert self.drawn is not None
            ids.index_copy_(0, places, self.drawn.index_select(0, rows))
        if changes:
            self._table.view(-1).index_copy_(0, changes[0], changes[1])
        return replace(
            inputs,
            input_ids=ids,
            positions=positions,
            logits_indices=logits_indices,
            metadata=AttentionMetadata(
                query_start=query_start,
                seq_lens=seq_lens,
                table_rows=table_rows,
                block_table=self._table,
                slot_mapping=slots,
                max_query_len=max_query_len,
            ),
        )


_ALIGNMENT = 16
_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class UploadBuffer:
    """A pinned host buffer and a buffer of the same size on the device.

    Arrays of the same sizes always have the same addresses, as captured graphs require.

    Args:
        capacity: bytes of all arrays of one upload, from `upload_bytes`.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        has_events = is_gpu(device)
        self._host = torch.empty(capacity, dtype=torch.uint8, pin_memory=has_events)
        self._bytes: npt.NDArray[np.uint8] = self._host.numpy()
        self._device = torch.zeros(capacity, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if has_events else None  # type: ignore[no-untyped-call]

    def upload(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Return the arrays on the device, one-dimensional. They are valid until the next upload."""
        if self._copied is not None:
            self._copied.synchronize()  # the previous copy must have read the host buffer
        views, end = [], 0
        for array in arrays:
            start, end = end, end + array.nbytes
            self._bytes[start:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            views.append(self._device[start:end].view(_DTYPES[array.dtype]))
            end = _aligned(end)
        self._device[:end].copy_(self._host[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return views


def upload_bytes(*sizes: tuple[int, int]) -> int:
    """Return the bytes for arrays of (elements, bytes of an element)."""
    return sum(_aligned(count * itemsize) for count, itemsize in sizes)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
