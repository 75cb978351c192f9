"""The sampler: a pure function of logits, parameters and one uniform number for each row.

Order of operations, as in vLLM: log-probabilities of the raw logits; allowed tokens, bad words, suppressed tokens and
biases; logits processors; grammar; penalties; temperature; min-p; top-k; top-p; then the inverse of the cumulative
distribution in token order at u. Each row is computed independently, so other requests cannot change its token.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.runner.contracts import TokenLogprobs
from headrace_engine.runner.elementwise import native_ops
from headrace_engine.runner.native import native_library


class TokenRules:
    """Changes one row of logits in place, as a function of the request and its output so far.

    Args:
        bad_words_token_ids: all tokenisations of every bad word, none of them empty.
    """

    def __init__(self, params: SamplingParams, bad_words_token_ids: Sequence[Sequence[int]]) -> None:
        self._allowed = _ids(params.allowed_token_ids) if params.allowed_token_ids is not None else None
        self._banned = _ids([word[0] for word in bad_words_token_ids if len(word) == 1])
        self._endings: dict[int, list[tuple[list[int], int]]] = {}
        """Second to last token of a bad word -> (all its tokens but the last, its last token)."""
        for word in bad_words_token_ids:
            if len(word) > 1:
                self._endings.setdefault(word[-2], []).append((list(word[:-1]), word[-1]))
        bias = params.logit_bias or {}
        self._biased = _ids(list(bias))
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32)

    @property
    def needs_output(self) -> bool:
        return bool(self._endings)

    def apply(self, logits: torch.Tensor, output_token_ids: Sequence[int]) -> None:
        """Change the logits of a request, [vocabulary] float32, in place."""
        if self._allowed is not None:
            kept = logits[self._allowed]
            logits.fill_(float("-inf"))
            logits[self._allowed] = kept
        if len(self._banned):
            logits[self._banned] = float("-inf")
        if output_token_ids:
            for beginning, last in self._endings.get(output_token_ids[-1], ()):
                if list(output_token_ids[-len(beginning) :]) == beginning:
                    logits[last] = float("-inf")
        if len(self._biased):
            logits[self._biased] += self._bias


def create_token_rules(params: SamplingParams, bad_words_token_ids: Sequence[Sequence[int]]) -> TokenRules | None:
    """Return the rules of a request, or None if it has none."""
    if params.allowed_token_ids is None and not params.logit_bias and not bad_words_token_ids:
        return None
    return TokenRules(params, bad_words_token_ids)


def _ids(token_ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor(token_ids, dtype=torch.long)


NO_TOKEN = -1
"""The result for a row whose rules allow no token."""
# For top-p, only so many of the most likely tokens are sorted. If a row keeps more, which is rare, all are sorted.
_PARTIAL_SORT = 1024
_LARGEST = torch.finfo(torch.float32).max
# A logits processor or an extreme penalty may set infinity, which softmax would turn into NaN.
_LARGEST_LOGIT = 1e30
# Tokens for which prompt log-probabilities are computed at a time: each needs a few rows of the vocabulary size.
_LOGPROB_ROWS = 64


@dataclass(slots=True, kw_only=True)
class SamplingRow:
    """The parameters and history for one row of logits."""

    params: SamplingParams
    u: float
    """Uniform in [0, 1), a function of the seed and the position only. Unused for a greedy row."""
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    suppressed_token_ids: Sequence[int]
    """Tokens that must not be drawn: end and stop tokens until the output has min_tokens."""
    rules: TokenRules | None = None
    processor: Callable[[Sequence[int], Sequence[int], torch.Tensor], torch.Tensor] | None = None
    """The logits processors of the request: (prompt, output, logits) -> logits."""
    grammar_mask: bytes | None = None
    """Bit i of byte j says whether token 8 j + i may be drawn."""


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> tuple[list[int], dict[int, TokenLogprobs]]:
    """Draw one token for each row.

    Args:
        logits: [rows, vocabulary], any float type; not changed.
        rows: one entry per row of logits.

    Returns:
        The token ids (`NO_TOKEN` if none is allowed), and by row index the log-probabilities that rows asked for.
    """
    token_ids = draw_tokens(logits, rows)
    return token_ids, {
        index: _logprobs(logits[index].float(), token_ids[index], row.params)
        for index, row in enumerate(rows)
        if row.params.wants_logprobs and token_ids[index] != NO_TOKEN
    }


def draw_tokens(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Draw as `sample` does, without log-probabilities."""
    adjusted, empty = _adjust(logits, rows)
    tokens = _argmax(adjusted)
    drawn = [index for index, row in enumerate(rows) if not row.params.is_greedy]
    if drawn:
        tokens[drawn] = _draw(adjusted[drawn].float(), [rows[index] for index in drawn])
    token_ids: list[int] = tokens.tolist()
    for index in empty:
        token_ids[index] = NO_TOKEN
    return token_ids


_has_kernels = functools.cache(native_ops.is_built)


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the first largest element of each row."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    if logits.dtype in native_library.DTYPES and _has_kernels():
        return native_ops.argmax(logits)
    if logits.dtype is not torch.bfloat16:
        return torch.from_numpy(logits.numpy().argmax(axis=-1))  # ten times as fast as torch
    # Positive numbers have the same order as their bits. Converting all numbers first would take ten times as long.
    bits = logits.view(torch.int16).numpy()
    found = bits.argmax(axis=-1)
    others = np.flatnonzero(np.take_along_axis(bits, found[:, None], axis=-1)[:, 0] <= 0)
    found[others] = logits[others].float().numpy().argmax(axis=-1)
    return torch.from_numpy(found)


def prompt_logprobs(logits: torch.Tensor, token_ids: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Return the log-probabilities of the tokens of a prompt.

    Args:
        logits: [tokens, vocabulary], any float type: the logits at the token before each of `token_ids`.
        count: number of most likely tokens to report besides each token; -1 for the whole vocabulary.
    """
    found: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), _LOGPROB_ROWS):
        own = torch.tensor(token_ids[start : start + _LOGPROB_ROWS], dtype=torch.long)
        logprobs = torch.log_softmax(logits[start : start + _LOGPROB_ROWS].float(), dim=-1)
        values = logprobs.gather(1, own[:, None])
        ranks = (logprobs > values).sum(dim=-1) + 1
        best = logprobs.topk(_num_best(logprobs, count), dim=-1)
        rows = (own, values[:, 0], ranks, best.indices, best.values)
        found += [_entry(*row) for row in zip(*(tensor.tolist() for tensor in rows), strict=True)]
    return found


def _adjust(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> tuple[torch.Tensor, list[int]]:
    """Apply rules, suppression, processors, grammars and penalties. Copy to float32 only if a row needs them.

    Returns:
        The logits, and the indices of the rows without an allowed token.
    """
    changed = [
        index
        for index, row in enumerate(rows)
        if row.suppressed_token_ids or row.params.has_penalties or row.rules or row.processor or row.grammar_mask
    ]
    if not changed:
        return logits, []
    logits = logits.to(torch.float32, copy=True)
    for index in changed:
        row = rows[index]
        if row.rules:
            row.rules.apply(logits[index], row.output_token_ids)
        if row.suppressed_token_ids:
            logits[index, list(row.suppressed_token_ids)] = float("-inf")
        if row.processor:
            logits[index] = row.processor(row.prompt_token_ids, row.output_token_ids, logits[index]).clamp(
                max=_LARGEST_LOGIT
            )
        if row.grammar_mask:
            _apply_mask(logits[index], row.grammar_mask)
        if row.params.has_penalties:
            _penalise(logits[index], row)
    masked = [
        index
        for index in changed
        if rows[index].suppressed_token_ids or rows[index].rules or rows[index].processor or rows[index].grammar_mask
    ]
    alive = logits[masked].amax(dim=-1) > float("-inf")  # False for NaN too
    return logits, [index for index, lives in zip(masked, alive.tolist(), strict=True) if not lives]


def _apply_mask(logits: torch.Tensor, mask: bytes) -> None:
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), count=len(logits), bitorder="little")
    logits.masked_fill_(torch.from_numpy(bits) == 0, float("-inf"))


def _penalise(logits: torch.Tensor, row: SamplingRow) -> None:
    params = row.params
    output = torch.tensor(row.output_token_ids, dtype=torch.long)
    if params.repetition_penalty != 1.0:
        seen = torch.cat([torch.tensor(row.prompt_token_ids, dtype=torch.long), output]).unique()  # type: ignore[no-untyped-call]
        scores = logits[seen]
        penalty = min(max(float(params.repetition_penalty), 1 / _LARGEST), _LARGEST)
        penalised = torch.where(scores > 0, scores / penalty, scores * penalty).clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT)
        logits[seen] = penalised.masked_fill(scores == float("-inf"), float("-inf"))
    if len(output) and (params.frequency_penalty or params.presence_penalty):
        used, counts = output.unique(return_counts=True)  # type: ignore[no-untyped-call]
        logits[used] -= counts * params.frequency_penalty + params.presence_penalty


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    # A temperature beyond float32 would become infinite and make suppressed tokens NaN. An int may not fit in int64.
    column = torch.tensor([min(float(row.params.temperature), _LARGEST) for row in rows])[:, None]
    logits = logits / column
    min_p = torch.tensor([row.params.min_p for row in rows])[:, None]
    if bool((min_p > 0).any()):
        # p < min_p * p_max in logits, without a softmax
        logits = logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) + min_p.log(), float("-inf"))
    _keep_top_k(logits, rows)
    probs = torch.softmax(logits, dim=-1)
    _keep_top_p(probs, rows)
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    u = torch.tensor([row.u for row in rows], dtype=torch.float64)[:, None]
    # The first token whose cumulative probability exceeds u. A token of probability 0 is never drawn.
    tokens = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)[:, 0]
    # if u is so close to 1 that rounding passed the end: take the last token with a positive probability
    last = probs.shape[-1] - 1 - (probs.flip(-1) > 0).int().argmax(dim=-1)
    return torch.minimum(tokens, last)


def _keep_top_k(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Apply top-k in place. All tokens that tie with the k-th are kept, so the order of ties does not matter."""
    vocab_size = logits.shape[-1]
    wanted = [(index, row.params.top_k) for index, row in enumerate(rows) if 0 < row.params.top_k < vocab_size]
    if not wanted:
        return
    indices = [index for index, _ in wanted]
    largest = logits[indices].topk(max(k for _, k in wanted), dim=-1).values
    threshold = largest.gather(1, torch.tensor([[k - 1] for _, k in wanted]))
    kept = logits[indices]
    logits[indices] = kept.masked_fill(kept < threshold, float("-inf"))


def _keep_top_p(probs: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Apply top-p in place: keep the smallest set of most likely tokens that reaches top_p, including ties."""
    indices = [index for index, row in enumerate(rows) if row.params.top_p < 1.0]
    if not indices:
        return
    chosen = probs[indices]
    top_p = torch.tensor([rows[index].params.top_p for index in indices], dtype=torch.float64)[:, None]
    count = min(_PARTIAL_SORT, probs.shape[-1])
    ordered = chosen.topk(count, dim=-1).values
    if bool((ordered.sum(dim=-1, dtype=torch.float64) < top_p[:, 0]).any()):
        ordered = chosen.sort(dim=-1, descending=True).values
    before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
    num_kept = (before < top_p).sum(dim=-1, keepdim=True).clamp(min=1)
    threshold = ordered.gather(1, num_kept - 1)
    probs[indices] = chosen.masked_fill(chosen < threshold, 0.0)


def _logprobs(logits: torch.Tensor, token_id: int, params: SamplingParams) -> TokenLogprobs:
    logprobs = torch.log_softmax(logits, dim=-1)
    if params.logprob_token_ids is not None:
        wanted = [token_id, *(each for each in dict.fromkeys(params.logprob_token_ids) if each != token_id)]
        values = logprobs[wanted]
        ranks = [int((logprobs > value).sum()) + 1 for value in values]
        return list(zip(wanted, values.tolist(), ranks, strict=True))
    assert params.logprobs is not None
    own = float(logprobs[token_id])
    rank = int((logprobs > logprobs[token_id]).sum()) + 1
    best = logprobs.topk(_num_best(logprobs, params.logprobs))
    return _entry(token_id, own, rank, best.indices.tolist(), best.values.tolist())


def _num_best(logprobs: torch.Tensor, count: int) -> int:
    return logprobs.shape[-1] if count == -1 else min(count, logprobs.shape[-1])


def _entry(token_id: int, own: float, rank: int, best_ids: list[int], best_values: list[float]) -> TokenLogprobs:
    others = zip(best_ids, best_values, range(1, len(best_ids) + 1), strict=True)
    return [(token_id, own, rank), *((token, value, place) for token, value, place in others if token != token_id)]
