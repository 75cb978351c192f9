"""The scheduler's part of speculative decoding: the source of drafts, and how many of them a request may use.

A step computes the last token of a request together with its drafts. At each of these positions the runner draws the
same token as without drafts, and accepts the drafts that are equal. A draw is a function of (logits, parameters, seed,
position), so the output is the same as without drafts, token for token. There is no rejection sampling. Imports no
torch.
"""

from array import array
from collections.abc import Sequence

from headrace_engine.core.outputs import StepStats
from headrace_engine.options.speculative_config import SpeculativeConfig
from headrace_engine.requests.request import Request
from headrace_engine.runner.contracts import StepOutput

_TYPE = "i"
_WIDTH = array(_TYPE).itemsize


class NgramProposer:
    """Drafts the tokens that followed an earlier occurrence of the last n tokens (prompt lookup decoding).

    Args:
        num_tokens: maximum length of a draft.
        min_n: minimum length of the n-gram.
        max_n: maximum length of the n-gram.
    """

    def __init__(self, num_tokens: int, min_n: int, max_n: int) -> None:
        self._num_tokens = num_tokens
        self._min_n = min_n
        self._max_n = max_n
        self._texts: dict[str, bytearray] = {}
        """The tokens of each request, as bytes."""

    def propose(self, request_id: str, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens after the latest earlier occurrence of the longest n-gram that ends the sequence.

        Empty if there is no occurrence. If fewer than `num_tokens` tokens follow it, the draft repeats them until it
        has full length. Between calls with the same id, `token_ids` may only grow.
        """
        text = self._texts.setdefault(request_id, bytearray())
        text += array(_TYPE, token_ids[len(text) // _WIDTH :]).tobytes()
        start = self._continuation(text)
        if start is None:
            return []
        period = len(token_ids) - start
        draft = list(token_ids[start : start + self._num_tokens])
        while len(draft) < self._num_tokens:
            draft.append(draft[-period])
        return draft

    def forget(self, request_id: str) -> None:
        self._texts.pop(request_id, None)

    def _continuation(self, text: bytearray) -> int | None:
        """Return the index of the token after the longest match, or None if there is no match."""
        found: int | None = None
        length = len(text) // _WIDTH
        end = length - 1  # an occurrence must end before the last token
        for n in range(self._min_n, min(self._max_n, length - 1) + 1):
            # The end of a longer match is also the end of a shorter one, so search only up to the end just found.
            place = _rfind(text, text[(length - n) * _WIDTH :], end)
            if place is None:
                break
            found = end = place + n
        return found


def _rfind(text: bytearray, wanted: bytearray, end: int) -> int | None:
    """Return the index of the last occurrence that ends at or before token `end`."""
    limit = end * _WIDTH
    while True:
        place = text.rfind(wanted, 0, limit)
        if place < 0:
            return None
        if place % _WIDTH == 0:
            return place // _WIDTH
        limit = place + len(wanted) - 1  # the match starts within the bytes of a token


class Speculator:
    def __init__(self, config: SpeculativeConfig, max_model_len: int) -> None:
        self._num_tokens = config.num_speculative_tokens
        self._max_model_len = max_model_len
        self._ngram = (
            NgramProposer(config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max)
            if config.method == "ngram"
            else None
        )

    def num_lookahead_tokens(self, num_tokens: int) -> int:
        """Return the number of slots after `num_tokens` that the draft model of the runner needs."""
        return 0 if self._ngram else min(self._num_tokens, self._max_model_len - num_tokens)

    def propose(self, request: Request, output: StepOutput) -> list[int]:
        """Return the draft of a request for its next step."""
        params = request.sampling_params
        # If all drafts of a step are accepted, the request gets one token more than it has drafts.
        most = min(self._num_tokens, self._max_model_len - request.num_tokens - 1)
        if params.max_tokens is not None:
            most = min(most, params.max_tokens - request.num_output_tokens - 1)
        if most <= 0:
            return []
        if self._ngram is not None:
            return self._ngram.propose(request.request_id, request.token_ids)[:most]
        return output.draft_token_ids.get(request.request_id, [])[:most]

    def forget(self, request_id: str) -> None:
        if self._ngram is not None:
            self._ngram.forget(request_id)

    def count(self, stats: StepStats, num_drafted: int, num_accepted: int) -> None:
        """Add the verified draft of one request to the statistics of the step."""
        if not stats.drafted_per_position:
            stats.drafted_per_position = [0] * self._num_tokens
            stats.accepted_per_position = [0] * self._num_tokens
        for position in range(num_drafted):
            stats.drafted_per_position[position] += 1
            stats.accepted_per_position[position] += position < num_accepted
