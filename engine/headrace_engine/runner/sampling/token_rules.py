"""The rules of a request for single tokens: allowed tokens, bad words, biases. Created once, applied in every step."""

from collections.abc import Sequence

import torch

from headrace_engine.sampling_params import SamplingParams


class TokenRules:
    """Changes one row of logits in place, as a function of the request and its output so far.

    Args:
        bad_words_token_ids: all tokenisations of every bad word, none of them empty.
    """

    def __init__(self, params: SamplingParams, bad_words_token_ids: Sequence[Sequence[int]]) -> None:
        self._allowed = _ids(params.allowed_token_ids) if params.allowed_token_ids is not None else None
        self._banned = _ids([word[0] for word in bad_words_token_ids if len(word) == 1])
        self._endings: dict[int, list[tuple[list[int], int]]] = {}
        """Bad words of several tokens, by their second to last token: all tokens but the last, and the last."""
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
        """logits: [vocabulary] float32."""
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
