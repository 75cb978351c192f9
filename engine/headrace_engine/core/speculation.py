"""The scheduler's part of speculative decoding: the source of drafts, and how many of them a request may use.

A step computes the last token of a request together with its drafts. At each of these positions the runner draws the
same token as without drafts, and accepts the drafts that are equal. A draw is a function of (logits, parameters, seed,
position), so the output is that of plain decoding, token for token. There is no rejection sampling. Imports no torch.
"""

from headrace_engine.core.ngram_proposer import NgramProposer
from headrace_engine.core.outputs import StepStats
from headrace_engine.request import Request
from headrace_engine.runner.contracts import StepOutput
from headrace_engine.speculative_config import SpeculativeConfig


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
        # A step yields one token more than it has drafts.
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
