"""Draws tokens on the device, without a sort and with one wait per step. The host's `sampler.py` draws the same tokens.

Greedy rows take the arg max. Rows without top-k and top-p draw from the whole vocabulary, by the inverse of the
cumulative distribution at the host's u. Rows with top-k or top-p draw from the most likely tokens
(`graph_sampling.py`). If these were too few, the host draws. It also draws for rows with penalties, masks or
log-probabilities.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace_engine.runner.contracts import TokenLogprobs
from headrace_engine.runner.cuda.device import is_gpu
from headrace_engine.runner.cuda.step import UploadBuffer, upload_bytes
from headrace_engine.runner.sampling.graph_sampling import (
    CANDIDATES,
    NUM_SAMPLING_VALUES,
    draw,
    needs_host,
    sampling_values_of,
)
from headrace_engine.runner.sampling.sampler import SamplingRow, draw_tokens, sample

_CHUNK = 1024
_HOTTEST = 1e30
"""Larger temperatures do not change the result, and do not fit in float32."""


class DrawnAhead:
    """Tokens that the device draws, and their copy to the host.

    Args:
        drawn: on the device.
        found: [2, rows] in pinned memory: the tokens, and whether each is the right one. Valid after `arrived`.
    """

    def __init__(self, drawn: "_Drawn", found: torch.Tensor, arrived: torch.cuda.Event | None) -> None:
        self._drawn = drawn
        self._found = found
        self._arrived = arrived

    @property
    def tokens(self) -> torch.Tensor:
        """[rows] int64 on the device, including those that `wait` replaces."""
        return self._drawn.tokens

    def wait(self) -> tuple[list[int], set[int]]:
        """Return the tokens, and the rows for which the host has drawn another token than the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
        token_ids, is_exact = self._found.tolist()
        doubtful = [index for index, row in enumerate(self._drawn.limited) if not is_exact[row]]
        if not doubtful:
            return token_ids, set()
        others = set()
        redrawn = draw_tokens(self._drawn.logits[doubtful].cpu(), [self._drawn.rows[index] for index in doubtful])
        for index, token_id in zip(doubtful, redrawn, strict=True):
            row = self._drawn.limited[index]
            if token_ids[row] != token_id:
                token_ids[row] = token_id
                others.add(row)
        return token_ids, others


@dataclass(frozen=True, slots=True)
class _Drawn:
    """The tokens of the rows of a step."""

    tokens: torch.Tensor
    """[rows] int64"""
    is_exact: torch.Tensor
    """[rows] int64; 0 if the token may be wrong."""
    limited: list[int]
    """The rows that were drawn from the most likely tokens, which may have been too few."""
    logits: torch.Tensor
    """[limited, vocabulary] float32, a copy."""
    rows: list[SamplingRow]
    """The sampling rows of `limited`."""


def draws_on_device(row: SamplingRow) -> bool:
    """Whether the device can draw for a row, and usually draws the right token."""
    return not needs_host(row) and row.params.top_k <= CANDIDATES


class DeviceSampler:
    """Samples on the device.

    Args:
        max_rows: maximum number of rows of logits in a step.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        sizes = [(max_rows, 8)] * 5, [(max_rows * NUM_SAMPLING_VALUES, 4), (max_rows, 4)]
        self._buffer = UploadBuffer(upload_bytes(*sizes[0], *sizes[1]), device)
        has_events = is_gpu(device)
        self._found = torch.empty((2, max_rows), dtype=torch.int64, pin_memory=has_events)
        self._drawn = torch.cuda.Event() if has_events else None  # type: ignore[no-untyped-call]
        # Two buffers in turn: the tokens of a step are read after the next step was launched.
        self._found_ahead = torch.empty((2, 2, max_rows), dtype=torch.int64, pin_memory=has_events)
        self._turn = 0

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """Sample as `runner.sampling.sampler.sample` does.

        Args:
            logits: [at least rows, vocabulary] on the device, any float type; not changed.
        """
        if not rows:
            return [], {}
        logits = logits[: len(rows)]
        on_host = [index for index, row in enumerate(rows) if needs_host(row)]
        token_ids, exact = self._draw(logits, rows, set(on_host))
        on_host += [index for index, is_exact in enumerate(exact) if not is_exact]
        if not on_host:
            return token_ids, {}
        found, logprobs = sample(logits[on_host].cpu(), [rows[index] for index in on_host])
        for index, token_id in zip(on_host, found, strict=True):
            token_ids[index] = token_id
        return token_ids, {on_host[index]: entry for index, entry in logprobs.items()}

    def draw_ahead(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> DrawnAhead:
        """Draw without waiting, for rows that all satisfy `draws_on_device`.

        First wait for the result of the last call but one: this call uses the same buffer.
        """
        drawn = self._drawn_on_device(logits[: len(rows)], rows, set())
        self._turn = 1 - self._turn
        found = self._found_ahead[self._turn, :, : len(rows)]
        found[0].copy_(drawn.tokens, non_blocking=True)
        found[1].copy_(drawn.is_exact, non_blocking=True)
        arrived = None
        if self._drawn is not None:
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        return DrawnAhead(drawn, found, arrived)

    def _draw(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], skipped: set[int]
    ) -> tuple[list[int], list[int]]:
        """Draw for all rows on the device. Results for skipped rows are undefined."""
        drawn = self._drawn_on_device(logits, rows, skipped)
        here = self._found[:, : len(rows)]
        here[0].copy_(drawn.tokens, non_blocking=True)
        here[1].copy_(drawn.is_exact, non_blocking=True)
        if self._drawn is not None:
            self._drawn.record()
            self._drawn.synchronize()
        token_ids, is_exact = here.tolist()
        return token_ids, is_exact

    def _drawn_on_device(self, logits: torch.Tensor, rows: Sequence[SamplingRow], skipped: set[int]) -> _Drawn:
        drawn = [i for i, row in enumerate(rows) if i not in skipped and not row.params.is_greedy]
        limited = [i for i in drawn if rows[i].params.top_k > 0 or rows[i].params.top_p < 1.0]
        free = [i for i in drawn if rows[i].params.top_k <= 0 and rows[i].params.top_p >= 1.0]
        chosen_logits = logits.new_empty(0)
        tokens = logits.argmax(dim=-1)
        exact = torch.ones_like(tokens)
        if drawn:
            vocab_size = logits.shape[-1]
            sampling_values = [sampling_values_of(rows[i], vocab_size) for i in limited]
            params = [rows[i].params for i in free]
            uploaded = self._buffer.upload(
                [
                    np.array(limited, dtype=np.int64),
                    np.array(free, dtype=np.int64),
                    np.array([min(own.temperature, _HOTTEST) for own in params], dtype=np.float64),
                    np.array([own.min_p for own in params], dtype=np.float64),
                    np.array([rows[i].u for i in free], dtype=np.float64),
                    np.array([own for own, _ in sampling_values], dtype=np.float32).reshape(-1),
                    np.array([top_k for _, top_k in sampling_values], dtype=np.int32),
                ]
            )
            limited_at, free_at, temperature, min_p, u, knob_values, top_k = uploaded
            if free:
                chosen = logits.index_select(0, free_at).float()
                tokens.index_copy_(0, free_at, draw_from_all(chosen, temperature, min_p, u))
            if limited:
                chosen_logits = logits.index_select(0, limited_at).float()
                found = draw(chosen_logits, knob_values.view(-1, NUM_SAMPLING_VALUES), top_k)
                tokens.index_copy_(0, limited_at, found.tokens.long())
                exact.index_copy_(0, limited_at, found.is_exact.long())
        return _Drawn(tokens, exact, limited, chosen_logits, [rows[i] for i in limited])


def draw_from_all(
    logits: torch.Tensor, temperature: torch.Tensor, min_p: torch.Tensor, u: torch.Tensor
) -> torch.Tensor:
    """Draw one token for each row from the whole vocabulary: the first whose cumulative weight exceeds u times the sum.

    The sum is computed in chunks, so that only one chunk and the sums of chunks need float64.

    Args:
        logits: [rows, vocabulary] float32
        temperature, min_p, u: [rows] float64; temperatures above 0, min_p of 0 keeps all
    """
    num_rows, vocab_size = logits.shape
    num_chunks = -(-vocab_size // _CHUNK)
    scaled = logits / temperature.float()[:, None]
    largest = scaled.amax(dim=-1, keepdim=True)
    scaled.masked_fill_(scaled < largest + min_p.log().float()[:, None], float("-inf"))
    weights = logits.new_zeros((num_rows, num_chunks * _CHUNK))
    weights[:, :vocab_size] = torch.exp(scaled - largest)
    chunks = weights.view(num_rows, num_chunks, _CHUNK)
    cumulative = chunks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    goal = u[:, None] * cumulative[:, -1:]
    chunk = torch.minimum((cumulative <= goal).sum(dim=-1), _last(chunks.amax(dim=-1)))
    before = torch.where(chunk > 0, cumulative.gather(1, (chunk - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    own = chunks.gather(1, chunk[:, None, None].expand(-1, 1, _CHUNK))[:, 0]
    within = own.cumsum(dim=-1, dtype=torch.float64) + before[:, None]
    offset = torch.minimum((within <= goal).sum(dim=-1), _last(own))
    return chunk * _CHUNK + offset


def _last(weights: torch.Tensor) -> torch.Tensor:
    """Return the last positive entry of each row. It is the result if rounding passes the end of the row."""
    return weights.shape[-1] - 1 - (weights.flip(-1) > 0).int().argmax(dim=-1)
