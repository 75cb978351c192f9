"""Draws tokens inside a graph: without a sort, device randomness, or shapes that depend on values.

It draws the same tokens as `sampler.py`, from the `CANDIDATES` most likely ones: the arg max for greedy rows, otherwise
the inverse of the cumulative distribution in token order at the host's u. If the candidates do not include every token
that the parameters of a row keep, the result says so, and the host draws from the logits.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.runner.sampling.sampler import SamplingRow

CANDIDATES = 256

NUM_SAMPLING_VALUES = 4
"""Floats for each row, in this order: temperature (0: greedy), top_p, log of min_p, u."""

# Used instead of minus infinity: some devices do not return NaN or zero as expected when they multiply it.
_MIN_LOGIT = -1e30

_HOST_KNOWS = {"prompt_token_ids", "output_token_ids", "params", "u"}
# Parameters that the graph supports, or that do not affect the choice of a token. If any other one is not at its
# default, the host draws. So a new parameter of the sampler is never ignored here.
_GRAPH_KNOWS = {
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "output_kind",
    "detokenize",
    "spaces_between_special_tokens",
    "stream_interval",
    "repetition_detection",
}


@dataclass(frozen=True, slots=True)
class Drawn:
    """The result for each row."""

    tokens: torch.Tensor
    """[rows] int32"""
    is_exact: torch.Tensor
    """[rows] int32; 0 if kept tokens may be missing from the candidates, so that `tokens` must not be used."""


def draw(logits: torch.Tensor, sampling_values: torch.Tensor, top_k: torch.Tensor) -> Drawn:
    """Draw one token for each row.

    Args:
        logits: [rows, vocabulary] float32
        sampling_values: [rows, NUM_SAMPLING_VALUES] float32
        top_k: [rows] int32, 0 keeps all
    """
    temperature, top_p, log_min_p, u = (
        sampling_values[:, 0:1],
        sampling_values[:, 1:2],
        sampling_values[:, 2:3],
        sampling_values[:, 3:4],
    )
    is_greedy = temperature == 0.0
    scaled = logits / torch.where(is_greedy, 1.0, temperature)
    vocab_size = logits.shape[-1]
    count = min(CANDIDATES, vocab_size)
    values, ids = scaled.topk(count, dim=-1)
    ids = ids.to(torch.int32)
    largest, smallest = values[:, :1], values[:, count - 1 :]

    # All tokens that tie with the last kept one are kept, so that the order of ties does not matter.
    k = top_k[:, None]
    at_k = values.gather(1, (k - 1).clamp(0, count - 1))
    limits_k = (k > 0) & (k <= count)
    threshold = torch.maximum(largest + log_min_p, torch.where(limits_k, at_k, _MIN_LOGIT))
    holds_all = smallest < threshold  # tokens beyond the candidates are even less likely
    weights = torch.exp(values - largest)
    kept_weights = torch.where(values >= threshold, weights, 0.0)
    whole = torch.exp(torch.logsumexp(scaled, dim=-1, keepdim=True) - largest)
    restricts = limits_k | (k > 0) | (log_min_p > _MIN_LOGIT)
    probs = kept_weights / torch.where(holds_all, kept_weights.sum(dim=-1, keepdim=True), whole)

    positions = torch.arange(count, device=logits.device, dtype=torch.int32)
    earlier = (positions[:, None] < positions[None, :]).to(probs.dtype)
    num_kept = ((probs @ earlier) < top_p).to(torch.int32).sum(dim=-1, keepdim=True, dtype=torch.int32)
    at_p = values.gather(1, (num_kept - 1).clamp(0, count - 1))
    limits_p = top_p < 1.0
    kept_weights = torch.where(limits_p & (values < at_p), 0.0, kept_weights)
    reaches_p = limits_p & (probs.sum(dim=-1, keepdim=True) >= top_p) & (smallest < at_p)
    is_exact = is_greedy | holds_all | (reaches_p & ~restricts)
    if vocab_size <= CANDIDATES:
        is_exact = torch.ones_like(is_exact)

    # Cumulative weights in token order without a sort: each candidate sums the weights of ids up to its own.
    not_after = (ids[:, None, :] <= ids[:, :, None]).to(kept_weights.dtype)
    cumulative = (not_after @ kept_weights[:, :, None])[:, :, 0]
    is_kept = kept_weights > 0
    goal = u * kept_weights.sum(dim=-1, keepdim=True)
    reached = torch.where(is_kept & (cumulative > goal), ids, vocab_size).amin(dim=-1)
    last = torch.where(is_kept, ids, 0).amax(dim=-1)  # for a u so close to 1 that rounding passes the end
    drawn = torch.minimum(reached, last)
    tokens = torch.where(is_greedy[:, 0], logits.argmax(dim=-1).to(torch.int32), drawn)
    return Drawn(tokens, is_exact[:, 0].to(torch.int32))


def sampling_values_of(row: SamplingRow, vocab_size: int) -> tuple[npt.NDArray[np.float32], int]:
    """Return the arguments of `draw` for a row: its sampling_values, and its top_k."""
    params = row.params
    log_min_p = float(np.log(params.min_p)) if params.min_p > 0 else _MIN_LOGIT
    # a device may flush subnormals to 0, which means greedy
    temperature = 0.0 if params.is_greedy else min(params.temperature, 1e30)
    top_k = params.top_k if params.top_k < vocab_size else 0
    return np.array([temperature, params.top_p, log_min_p, row.u], dtype=np.float32), top_k


def needs_host(row: SamplingRow) -> bool:
    """Whether a row needs what the graph does not support: penalties, masks, log-probabilities."""
    return _is_special(row.params) or any(
        _is_given(getattr(row, field.name)) for field in fields(row) if field.name not in _HOST_KNOWS
    )


def _is_special(params: SamplingParams) -> bool:
    return any(getattr(params, name) != default for name, default in _DEFAULTS)


def _is_given(value: Any) -> bool:
    return value is not None and not (hasattr(value, "__len__") and len(value) == 0)


_DEFAULTS = [
    (field.name, getattr(SamplingParams(), field.name))
    for field in fields(SamplingParams)
    if field.name not in _GRAPH_KNOWS
]
