"""The requests that a runner knows, and the input tensors of a step.

A request arrives whole once, and as deltas afterwards (`StepBatch`). It keeps one row of the block table while the
runner knows it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from headrace_engine.errors import NOTHING_MAY_FOLLOW
from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.runner.attention.backend import AttentionMetadata
from headrace_engine.runner.contracts import GrammarBitmask, NewRequest, StateSnapshot, StepBatch, TokenLogprobs
from headrace_engine.runner.recurrent.groups import SequencePart, StateGroup, group, split_at
from headrace_engine.runner.sampling.request_processors import ProcessorSet, RequestProcessors
from headrace_engine.runner.sampling.rng import uniform
from headrace_engine.runner.sampling.sampler import (
    NO_TOKEN,
    SamplingRow,
    TokenRules,
    create_token_rules,
    prompt_logprobs,
)

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
    """Leading tokens whose K/V the draft model has computed."""
    num_prompt_logprobs: int | None
    """Number of prompt log-probabilities so far. None: not wanted."""
    rules: TokenRules | None
    processors: RequestProcessors | None
    lora_version: int | None
    state_slot: int | None
    """The slot of its recurrent states. None: the model has no recurrent layers."""
    expected: "ExpectedToken | None" = None
    """The last token, if a step in flight draws it. `token_ids` holds 0 for it."""

    @property
    def needs_tokens(self) -> bool:
        """Whether the sampler needs the tokens of the request besides its logits."""
        rules = self.rules
        return self.params.has_penalties or self.processors is not None or (rules is not None and rules.needs_output)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(slots=True, kw_only=True)
class StepInputs:
    """The inputs of one step for the model."""

    input_ids: torch.Tensor
    """[tokens] int64"""
    positions: torch.Tensor
    """[tokens] int64"""
    metadata: AttentionMetadata
    sampled_ids: list[str]
    """The requests that get tokens in this step."""
    logits_indices: torch.Tensor
    """[rows + targets]: indices of the tokens with logits. For each of `sampled_ids` its last known token and drafts,
    then the token before each prompt target."""
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    prompt_targets: dict[str, list[int]] = field(default_factory=dict)
    """Request id -> the prompt tokens whose log-probabilities are wanted."""
    lora_versions: list[int | None] | None = None
    """The adapter of each sequence. None if no sequence has one."""
    expected: "dict[int, ExpectedToken]" = field(default_factory=dict)
    """Index in `input_ids` -> the token that a step in flight draws."""
    logits_start: torch.Tensor | None = None
    """[sequences + 1] int32: the first entry of each sequence in `logits_indices`, like `query_start` for tokens.

    None if all tokens have logits, or if others than the last tokens of each sequence do."""
    state_groups: list[StateGroup] = field(default_factory=list)
    """What recurrent layers compute at once. Empty if the model has no such layers."""

    def by_request(self, rows: dict[int, T], accepted: dict[str, list[int]]) -> dict[str, list[T]]:
        """Group the entries of logits rows by request, for accepted tokens only.

        Requests without entries are omitted.
        """
        found, row = {}, 0
        for request_id in self.sampled_ids:
            if row in rows:
                found[request_id] = [rows[row + index] for index in range(len(accepted[request_id]))]
            row += 1 + len(self.draft_token_ids.get(request_id, ()))
        return found


@dataclass(slots=True)
class TokenSpan:
    """Adjacent tokens of one request that are computed together."""

    request: RunningRequest
    start: int
    """Position of the first token."""
    token_ids: Sequence[int]
    num_logits: int
    """How many of the last tokens have logits."""


@dataclass(slots=True)
class ExpectedToken:
    """A token that a step in flight draws for a request. The request may have been removed in the meantime."""

    request_id: str
    request: RunningRequest
    row: int
    """Index among the tokens that the step draws."""
    position: int
    """Index in the tokens of the request."""
    is_void: bool = False
    """It was drawn after a wrong token."""

    def arrive(self, token_id: int, *, is_other: bool) -> bool:
        """Store the token.

        Args:
            is_other: whether `token_id` differs from the token on the device, which the next step may have used.

        Returns:
            Whether the next step has used the wrong token, so that its token for this request is void.
        """
        request = self.request
        request.token_ids[self.position] = token_id
        last = request.expected
        if last is self:
            request.expected = None
        elif is_other and last is not None:
            last.is_void, request.expected = True, None
            del request.token_ids[last.position]
            request.num_computed_tokens -= 1
            return True
        return False


class RequestBatch:
    """The requests that the runner knows."""

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int, block_size: int, processors: ProcessorSet) -> None:
        self._block_size = block_size
        self._processors = processors
        self._table: npt.NDArray[np.int32] = np.zeros((max_num_seqs + 1, max_blocks_per_seq), dtype=np.int32)
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.requests: dict[str, RunningRequest] = {}

    def update(self, batch: StepBatch) -> None:
        """Apply the removals, new requests and new blocks of a step."""
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
            num_prompt_logprobs=arrival.num_prompt_logprobs,
            rules=create_token_rules(arrival.sampling_params, arrival.bad_words_token_ids),
            processors=self._processors.for_request(arrival.sampling_params),
            lora_version=arrival.lora_version,
            state_slot=arrival.state_slot,
        )
        self._append_blocks(request, arrival.block_ids)
        self.requests[arrival.request_id] = request

    def _append_blocks(self, request: RunningRequest, block_ids: list[int]) -> None:
        end = request.num_blocks + len(block_ids)
        self._table[request.table_row, request.num_blocks : end] = block_ids
        request.num_blocks = end

    def prepare(self, batch: StepBatch) -> StepInputs:
        """Return the inputs of a step. Count its tokens as computed, except for drafts."""
        spans, sampled_ids = [], []
        prompt_targets: dict[str, list[int]] = {}
        target_indices: list[int] = []
        expected: dict[int, ExpectedToken] = {}
        state_parts: list[list[SequencePart]] = []
        num_tokens = 0
        for request_id, count in batch.num_scheduled_tokens.items():
            request = self.requests[request_id]
            start = request.num_computed_tokens
            if request.num_prompt_logprobs is not None:
                wanted = _wanted_targets(request, start, count)
                prompt_targets[request_id] = request.token_ids[wanted.start : wanted.stop]
                request.num_prompt_logprobs += len(wanted)
                target_indices += [num_tokens + position - 1 - start for position in wanted]
            if request.state_slot is not None:
                snapshots = batch.state_snapshots.get(request_id, ())
                state_parts.append(_state_parts(request.state_slot, num_tokens, start, count, snapshots))
            num_tokens += count
            drafts = batch.draft_token_ids.get(request_id, ())
            request.num_computed_tokens = end = start + count - len(drafts)
            sampled = end == len(request.token_ids)
            if sampled:
                sampled_ids.append(request_id)
                if request.expected is not None:
                    expected[num_tokens - 1] = request.expected
            token_ids = request.token_ids[start:end]
            spans.append(TokenSpan(request, start, [*token_ids, *drafts], 1 + len(drafts) if sampled else 0))
        inputs = self.pack(spans, sampled_ids, batch.draft_token_ids)
        inputs.expected = expected
        inputs.state_groups = group(state_parts)
        if target_indices:
            inputs.prompt_targets, inputs.logits_start = prompt_targets, None
            inputs.logits_indices = torch.cat([inputs.logits_indices, torch.tensor(target_indices)])
        return inputs

    def pack(
        self, spans: Sequence[TokenSpan], sampled_ids: list[str], draft_token_ids: dict[str, list[int]]
    ) -> StepInputs:
        """Concatenate spans to one row of tokens."""
        token_ids: list[int] = []
        logits_indices: list[int] = []
        starts = [0]
        for span in spans:
            token_ids += span.token_ids
            logits_indices += range(len(token_ids) - span.num_logits, len(token_ids))
            starts.append(len(logits_indices))
        num_scheduled = np.array([len(span.token_ids) for span in spans], dtype=np.int32)
        first_positions = np.array([span.start for span in spans], dtype=np.int32)
        query_start = np.zeros(len(spans) + 1, dtype=np.int32)
        np.cumsum(num_scheduled, out=query_start[1:])
        positions = np.arange(len(token_ids)) + np.repeat(first_positions - query_start[:-1], num_scheduled)
        loras = [span.request.lora_version for span in spans]
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
                max_query_len=int(num_scheduled.max()),
            ),
            sampled_ids=sampled_ids,
            logits_indices=torch.tensor(logits_indices, dtype=torch.long),
            draft_token_ids=draft_token_ids,
            lora_versions=loras if any(version is not None for version in loras) else None,
            logits_start=torch.tensor(starts, dtype=torch.int32) if len(logits_indices) < len(token_ids) else None,
        )

    def sampling_rows(self, inputs: StepInputs) -> list[SamplingRow]:
        """Return one entry for each row of logits that is sampled."""
        if not inputs.draft_token_ids:
            return sampling_rows([(self.requests[request_id], ()) for request_id in inputs.sampled_ids])
        prefixes: list[tuple[RunningRequest, Sequence[int]]] = []
        for request_id in inputs.sampled_ids:
            drafts = inputs.draft_token_ids.get(request_id, ())
            prefixes += [(self.requests[request_id], drafts[:count]) for count in range(len(drafts) + 1)]
        return sampling_rows(prefixes)

    def restrict(self, rows: list[SamplingRow], inputs: StepInputs, bitmask: GrammarBitmask) -> None:
        """Set the grammar masks of the rows."""
        row = 0
        for request_id in inputs.sampled_ids:
            for index, mask in enumerate(bitmask.masks.get(request_id, ())):
                rows[row + index].grammar_mask = mask
                rows[row + index].suppressed_token_ids = ()
            row += 1 + len(inputs.draft_token_ids.get(request_id, ()))

    def expect(self, inputs: StepInputs) -> list[ExpectedToken]:
        """Append a placeholder for the token that each request of a step without drafts will get."""
        expected = []
        for row, request_id in enumerate(inputs.sampled_ids):
            request = self.requests[request_id]
            request.expected = ExpectedToken(request_id, request, row, len(request.token_ids))
            request.token_ids.append(0)
            expected.append(request.expected)
        return expected

    def fill_in(self, inputs: StepInputs) -> None:
        """Replace the placeholders in the inputs of a step by the tokens, which have arrived."""
        for index, expected in inputs.expected.items():
            inputs.input_ids[index] = expected.request.token_ids[expected.position]
        inputs.expected.clear()

    def accept(self, inputs: StepInputs, drawn: Iterable[int]) -> tuple[dict[str, list[int]], dict[str, str]]:
        """Append the drawn tokens, one for each row of logits, up to the first one that differs from the draft.

        K/V of accepted drafts count as computed.

        Returns:
            The accepted tokens by request, and the reasons for requests without a possible next token.
        """
        accepted, errors = {}, {}
        tokens = iter(drawn)
        for request_id in inputs.sampled_ids:
            request = self.requests[request_id]
            drafts = inputs.draft_token_ids.get(request_id, ())
            rows = [next(tokens) for _ in range(len(drafts) + 1)]
            equal = next((i for i, draft in enumerate(drafts) if rows[i] != draft), len(drafts))
            if rows[equal] == NO_TOKEN:
                errors[request_id] = _why_no_token(request)
                accepted[request_id] = rows[:equal]
            else:
                accepted[request_id] = rows[: equal + 1]
            request.token_ids += accepted[request_id]
            request.num_computed_tokens += equal
        return accepted, errors

    def prompt_logprobs(self, logits: torch.Tensor, inputs: StepInputs) -> dict[str, list[TokenLogprobs]]:
        """Return the log-probabilities of `inputs.prompt_targets`. `logits` begins with their rows, on any device."""
        found: dict[str, list[TokenLogprobs]] = {}
        if not inputs.prompt_targets:  # avoids a copy from the device
            return found
        on_host, done = logits.cpu(), 0
        for request_id, targets in inputs.prompt_targets.items():
            count = self.requests[request_id].params.prompt_logprobs
            assert count is not None
            found[request_id] = prompt_logprobs(on_host[done : done + len(targets)], targets, count)
            done += len(targets)
        return found


def sampling_rows(prefixes: Sequence[tuple[RunningRequest, Sequence[int]]]) -> list[SamplingRow]:
    """Return one sampling row for each prefix. A prefix is the tokens of a request, followed by drafts."""
    drawn = [(r.seed, len(r.token_ids) + len(drafts)) for r, drafts in prefixes if not r.params.is_greedy]
    draws = iter(uniform(*zip(*drawn, strict=True)).tolist() if drawn else ())
    rows = []
    for request, drafts in prefixes:
        params, num_prompt = request.params, request.num_prompt_tokens
        shown = request.needs_tokens
        short = request.num_output_tokens + len(drafts) < params.min_tokens
        rows.append(
            SamplingRow(
                params=params,
                u=0.0 if params.is_greedy else next(draws),
                prompt_token_ids=request.token_ids[:num_prompt] if shown else (),
                output_token_ids=[*request.token_ids[num_prompt:], *drafts] if shown else (),
                suppressed_token_ids=request.suppressed_token_ids if short else (),
                rules=request.rules,
                processor=request.processors,
            )
        )
    return rows


def _state_parts(
    slot: int, first_row: int, start: int, count: int, snapshots: Sequence[StateSnapshot]
) -> list[SequencePart]:
    """Divide `count` tokens from position `start` on where the states are copied."""
    whole = SequencePart(first_row=first_row, num_tokens=count, is_first=start == 0, slot=slot)
    return split_at(whole, [(snapshot.num_tokens - start, snapshot.slot) for snapshot in snapshots])


def _why_no_token(request: RunningRequest) -> str:
    """Return the reason why no token is possible for a request."""
    if request.processors is not None and request.processors.failure is not None:
        return request.processors.failure
    return NOTHING_MAY_FOLLOW


def _wanted_targets(request: RunningRequest, start: int, count: int) -> range:
    """Return the positions of the prompt tokens whose log-probabilities the core lacks and this step can compute.

    The step computes `count` tokens from `start` on. The logits of each give the log-probability of the next token.
    """
    assert request.num_prompt_logprobs is not None
    first = max(start + 1, request.num_prompt_logprobs + 1)
    return range(first, max(first, min(start + count + 1, request.num_prompt_tokens)))
