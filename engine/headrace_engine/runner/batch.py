"""The runner's own record of requests, and the tensors of one step made from it.

Requests arrive whole once and as deltas afterwards (`StepBatch`); each holds one row of the block table for as long
as the runner knows it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from headrace_engine.runner.attention.backend import AttentionMetadata
from headrace_engine.runner.contracts import NewRequest, StepBatch
from headrace_engine.runner.rng import uniform
from headrace_engine.runner.sampler import SamplingRow
from headrace_engine.sampling_params import SamplingParams

T = TypeVar("T")


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
    num_draft_computed: int
    """Leading tokens whose K/V the draft model, where there is one, has computed."""

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
    """Requests that get tokens in this step."""
    logits_indices: torch.Tensor
    """[rows] for each such request its last token, and the drafts behind it."""
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)

    def by_request(self, rows: dict[int, T], accepted: dict[str, list[int]]) -> dict[str, list[T]]:
        """What belongs to the accepted tokens of each request, from a map of logits rows; requests without are left."""
        found, row = {}, 0
        for request_id in self.sampled_ids:
            if row in rows:
                found[request_id] = [rows[row + index] for index in range(len(accepted[request_id]))]
            row += 1 + len(self.draft_token_ids.get(request_id, ()))
        return found


@dataclass(slots=True)
class TokenSpan:
    """Neighbouring tokens of one request that are computed together."""

    request: RunningRequest
    start: int
    """Position of the first one."""
    token_ids: Sequence[int]
    num_logits: int
    """How many of the last ones give logits."""


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
            num_draft_computed=arrival.num_computed_tokens,
        )
        self._append_blocks(request, arrival.block_ids)
        self.requests[arrival.request_id] = request

    def _append_blocks(self, request: RunningRequest, block_ids: list[int]) -> None:
        end = request.num_blocks + len(block_ids)
        self._table[request.table_row, request.num_blocks : end] = block_ids
        request.num_blocks = end

    def prepare(self, batch: StepBatch) -> StepInputs:
        """The step's tensors; counts the scheduled tokens as computed, but not yet the drafts among them."""
        spans, sampled_ids = [], []
        for request_id, count in batch.num_scheduled_tokens.items():
            request = self.requests[request_id]
            start = request.num_computed_tokens
            drafts = batch.draft_token_ids.get(request_id, ())
            request.num_computed_tokens = end = start + count - len(drafts)
            sampled = end == len(request.token_ids)
            if sampled:
                sampled_ids.append(request_id)
            token_ids = request.token_ids[start:end]
            spans.append(TokenSpan(request, start, [*token_ids, *drafts], 1 + len(drafts) if sampled else 0))
        return self.pack(spans, sampled_ids, batch.draft_token_ids)

    def pack(
        self, spans: Sequence[TokenSpan], sampled_ids: list[str], draft_token_ids: dict[str, list[int]]
    ) -> StepInputs:
        """Spans behind one another in one row of tokens."""
        token_ids: list[int] = []
        logits_indices: list[int] = []
        for span in spans:
            token_ids += span.token_ids
            logits_indices += range(len(token_ids) - span.num_logits, len(token_ids))
        num_scheduled = np.array([len(span.token_ids) for span in spans], dtype=np.int32)
        first_positions = np.array([span.start for span in spans], dtype=np.int32)
        query_start = np.zeros(len(spans) + 1, dtype=np.int32)
        np.cumsum(num_scheduled, out=query_start[1:])
        positions = np.arange(len(token_ids)) + np.repeat(first_positions - query_start[:-1], num_scheduled)
        table_rows = np.array([span.request.table_row for span in spans], dtype=np.int32)
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
            logits_indices=torch.tensor(logits_indices, dtype=torch.long),
            draft_token_ids=draft_token_ids,
        )

    def sampling_rows(self, inputs: StepInputs) -> list[SamplingRow]:
        """One entry a row of logits."""
        if not inputs.draft_token_ids:
            return rows_at([(self.requests[request_id], ()) for request_id in inputs.sampled_ids])
        places: list[tuple[RunningRequest, Sequence[int]]] = []
        for request_id in inputs.sampled_ids:
            drafts = inputs.draft_token_ids.get(request_id, ())
            places += [(self.requests[request_id], drafts[:count]) for count in range(len(drafts) + 1)]
        return rows_at(places)

    def accept(self, inputs: StepInputs, drawn: Iterable[int]) -> dict[str, list[int]]:
        """Append what was drawn, one entry a row of logits: of each request up to the first one that is not its draft.

        K/V of the drafts that were drawn count as computed.
        """
        accepted = {}
        tokens = iter(drawn)
        for request_id in inputs.sampled_ids:
            request = self.requests[request_id]
            drafts = inputs.draft_token_ids.get(request_id, ())
            rows = [next(tokens) for _ in range(len(drafts) + 1)]
            equal = next((i for i, draft in enumerate(drafts) if rows[i] != draft), len(drafts))
            accepted[request_id] = rows[: equal + 1]
            request.token_ids += accepted[request_id]
            request.num_computed_tokens += equal
        return accepted


def rows_at(places: Sequence[tuple[RunningRequest, Sequence[int]]]) -> list[SamplingRow]:
    """What is drawn behind a request's tokens, and behind its tokens and some of its drafts."""
    draws = uniform([r.seed for r, _ in places], [len(r.token_ids) + len(drafts) for r, drafts in places])
    rows = []
    for (request, drafts), u in zip(places, draws, strict=True):
        params, num_prompt = request.params, request.num_prompt_tokens
        penalised = params.has_penalties
        short = request.num_output_tokens + len(drafts) < params.min_tokens
        rows.append(
            SamplingRow(
                params=params,
                u=float(u),
                prompt_token_ids=request.token_ids[:num_prompt] if penalised else (),
                output_token_ids=[*request.token_ids[num_prompt:], *drafts] if penalised else (),
                suppressed_token_ids=request.suppressed_token_ids if short else (),
            )
        )
    return rows
