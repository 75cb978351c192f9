"""The runner's own record of requests, and the tensors of one step made from it.

Requests arrive whole once and as deltas afterwards (`StepBatch`); each holds one row of the block table for as long
as the runner knows it.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from headrace_engine.runner.attention.backend import AttentionMetadata
from headrace_engine.runner.contracts import NewRequest, StepBatch
from headrace_engine.runner.rng import uniform
from headrace_engine.runner.sampler import SamplingRow
from headrace_engine.sampling_params import SamplingParams


@dataclass(slots=True)
class RunningRequest:
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    params: SamplingParams
    seed: int
    suppressed_token_ids: list[int]
    table_row: int
    num_blocks: int

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(slots=True, kw_only=True)
class StepInputs:
    """One step, ready for the model."""

    input_ids: torch.Tensor
    """[tokens] int64"""
    positions: torch.Tensor
    """[tokens] int64"""
    metadata: AttentionMetadata
    sampled_ids: list[str]
    """Requests that get a token in this step."""
    logits_indices: torch.Tensor
    """[sampled] index of each such request's last token."""


class RequestBatch:
    """All requests that the scheduler holds in the runner."""

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int, block_size: int) -> None:
        self._block_size = block_size
        self._table: npt.NDArray[np.int32] = np.zeros((max_num_seqs, max_blocks_per_seq), dtype=np.int32)
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.requests: dict[str, RunningRequest] = {}

    def update(self, batch: StepBatch) -> None:
        """Apply a step's removals, arrivals and new blocks."""
        for request_id in batch.removed_request_ids:
            request = self.requests.pop(request_id, None)
            if request is not None:
                self._free_rows.append(request.table_row)
        for arrival in batch.new_requests:
            self._add(arrival)
        for request_id, block_ids in batch.new_block_ids.items():
            self._append_blocks(self.requests[request_id], block_ids)

    def _add(self, arrival: NewRequest) -> None:
        request = RunningRequest(
            token_ids=arrival.token_ids,
            num_prompt_tokens=arrival.num_prompt_tokens,
            num_computed_tokens=arrival.num_computed_tokens,
            params=arrival.sampling_params,
            seed=arrival.seed,
            suppressed_token_ids=arrival.suppressed_token_ids,
            table_row=self._free_rows.pop(),
            num_blocks=0,
        )
        self._append_blocks(request, arrival.block_ids)
        self.requests[arrival.request_id] = request

    def _append_blocks(self, request: RunningRequest, block_ids: list[int]) -> None:
        end = request.num_blocks + len(block_ids)
        self._table[request.table_row, request.num_blocks : end] = block_ids
        request.num_blocks = end

    def prepare(self, batch: StepBatch) -> StepInputs:
        """The step's tensors; counts the scheduled tokens as computed."""
        token_ids: list[int] = []
        counts, starts, rows, sampled_ids, last_tokens = [], [], [], [], []
        for request_id, count in batch.num_scheduled_tokens.items():
            request = self.requests[request_id]
            start = request.num_computed_tokens
            token_ids += request.token_ids[start : start + count]
            request.num_computed_tokens = start + count
            starts.append(start)
            counts.append(count)
            rows.append(request.table_row)
            if request.num_computed_tokens == len(request.token_ids):
                sampled_ids.append(request_id)
                last_tokens.append(len(token_ids) - 1)
        num_scheduled = np.array(counts, dtype=np.int32)
        first_positions = np.array(starts, dtype=np.int32)
        query_start = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(num_scheduled, out=query_start[1:])
        positions = np.arange(len(token_ids)) + np.repeat(first_positions - query_start[:-1], num_scheduled)
        table_rows = np.array(rows, dtype=np.int32)
        blocks = self._table[np.repeat(table_rows, num_scheduled), positions // self._block_size]
        slots = blocks.astype(np.int64) * self._block_size + positions % self._block_size
        return StepInputs(
            input_ids=torch.tensor(token_ids, dtype=torch.long),
            positions=torch.from_numpy(positions),
            metadata=AttentionMetadata(
                query_start=torch.from_numpy(query_start),
                seq_lens=torch.from_numpy(first_positions + num_scheduled),
                table_rows=torch.from_numpy(table_rows),
                block_table=torch.from_numpy(self._table),
                slot_mapping=torch.from_numpy(slots),
            ),
            sampled_ids=sampled_ids,
            logits_indices=torch.tensor(last_tokens, dtype=torch.long),
        )

    def sampling_rows(self, request_ids: list[str]) -> list[SamplingRow]:
        requests = [self.requests[request_id] for request_id in request_ids]
        draws = uniform([r.seed for r in requests], [len(r.token_ids) for r in requests])
        return [
            SamplingRow(
                params=request.params,
                u=float(u),
                prompt_token_ids=request.token_ids[: request.num_prompt_tokens] if request.params.has_penalties else (),
                output_token_ids=request.token_ids[request.num_prompt_tokens :] if request.params.has_penalties else (),
                suppressed_token_ids=(
                    request.suppressed_token_ids if request.num_output_tokens < request.params.min_tokens else ()
                ),
            )
            for request, u in zip(requests, draws, strict=True)
        ]

    def append_tokens(self, request_ids: list[str], token_ids: list[int]) -> None:
        for request_id, token_id in zip(request_ids, token_ids, strict=True):
            self.requests[request_id].token_ids.append(token_id)
