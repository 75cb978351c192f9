"""Beam search by ordinary requests, with vLLM's parameters, results and scores.

Each step requests one token after each beam, with the log-probabilities of the `2 * beam_width` most likely tokens.
With the prefix cache, the model computes one token of each beam. The caller passes the function that extends beams.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from headrace_engine.errors import InvalidRequestError
from headrace_engine.requests.outputs import Logprob
from headrace_engine.vllm_names import with_vllm_names
from headrace_wire.rules import Boolean, Integer, Number, problems_of
from headrace_wire.sampling import MAX_N, SAMPLING
from headrace_wire.values import plain

_RULES = {
    "beam_width": Integer(1, MAX_N),
    "max_tokens": SAMPLING["max_tokens"],
    "length_penalty": Number(-100, 100),
    "temperature": Number(0, 0),
    "ignore_eos": Boolean(),
    "include_stop_str_in_output": Boolean(),
}


Extend = Callable[[list[list[int]]], list[dict[int, Logprob]]]
"""Token ids of each beam -> the most likely next tokens of each beam."""


@with_vllm_names("BeamSearchParams", InvalidRequestError)
@dataclass(slots=True, kw_only=True)
class BeamSearchParams:
    """The parameters of a beam search.

    Raises:
        InvalidRequestError: one or more values are out of range. The error names all of them.
    """

    beam_width: int
    """Number of sequences kept after each step, and returned."""
    max_tokens: int
    ignore_eos: bool = False
    """Continue beams after the end token."""
    temperature: float = 0.0
    """Only 0 is supported: beams are ranked by the log-probabilities of the model."""
    length_penalty: float = 1.0
    """The score is the sum of log-probabilities, divided by the number of tokens (prompt and output) to this power.
    Values above 0 favour longer sequences, values below 0 shorter ones."""
    include_stop_str_in_output: bool = False
    """Whether the text of a sequence includes the end token."""

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens", "temperature", "length_penalty"):
            setattr(self, name, plain(getattr(self, name)))
        if problems := problems_of(_RULES, {name: getattr(self, name) for name in _RULES}):
            raise InvalidRequestError(problems)


@dataclass(slots=True, kw_only=True)
class BeamSearchSequence:
    tokens: list[int]
    """Prompt and output."""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    """The candidates for each token of the output."""
    cum_logprob: float = 0.0
    text: str | None = None
    """Text of prompt and output, including special tokens."""
    finish_reason: str | None = None
    """stop for the end token, length otherwise."""
    stop_reason: int | str | None = None


@dataclass(slots=True, kw_only=True)
class BeamSearchOutput:
    sequences: list[BeamSearchSequence]
    """At most `beam_width` sequences, the best first."""


class BeamSearch:
    """The search for one prompt."""

    def __init__(
        self, prompt_token_ids: Sequence[int], params: BeamSearchParams, eos_token_ids: Collection[int], max_len: int
    ) -> None:
        self._params = params
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_len = max_len
        """Maximum tokens of prompt and output."""
        self.beams = [BeamSearchSequence(tokens=list(prompt_token_ids))]
        self._completed: list[BeamSearchSequence] = []

    def advance(self, successors: Sequence[dict[int, Logprob]]) -> None:
        """Replace the beams by their best continuations.

        Args:
            successors: for each beam, the most likely next tokens.
        """
        grown: list[BeamSearchSequence] = []
        for beam, candidates in zip(self.beams, successors, strict=True):
            for token_id, candidate in candidates.items():
                sequence = BeamSearchSequence(
                    tokens=[*beam.tokens, token_id],
                    logprobs=[*beam.logprobs, candidates],
                    cum_logprob=beam.cum_logprob + candidate.logprob,
                )
                if self._has_ended(sequence):
                    sequence.finish_reason = "stop"
                    self._completed.append(sequence)
                else:
                    grown.append(sequence)
        self.beams = self._best(grown)
        if self.beams and len(self.beams[0].tokens) >= self._max_len:
            self._completed += self.beams  # all beams have the same length
            self.beams = []

    def result(self) -> list[BeamSearchSequence]:
        """Return the best sequences, whether they have ended or not."""
        best = self._best([*self._completed, *self.beams])
        for sequence in best:
            sequence.finish_reason = sequence.finish_reason or "length"
        return best

    def shown(self, sequence: BeamSearchSequence) -> list[int]:
        """Return the tokens that the text includes."""
        if self._has_ended(sequence) and not self._params.include_stop_str_in_output:
            return sequence.tokens[:-1]
        return sequence.tokens

    def _has_ended(self, sequence: BeamSearchSequence) -> bool:
        return sequence.tokens[-1] in self._eos_token_ids and not self._params.ignore_eos

    def _best(self, sequences: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(sequences, key=self._score, reverse=True)[: self._params.beam_width]

    def _score(self, sequence: BeamSearchSequence) -> float:
        length = len(sequence.tokens) - (sequence.tokens[-1] in self._eos_token_ids)
        return sequence.cum_logprob / float(max(length, 1) ** self._params.length_penalty)


def search_together(searches: Sequence[BeamSearch], extend: Extend) -> bool:
    """Run one step of all active searches in one batch. Return False if no search is active."""
    active = [search for search in searches if search.beams]
    successors = iter(extend([beam.tokens for search in active for beam in search.beams]) if active else ())
    for search in active:
        search.advance([next(successors) for _ in search.beams])
    return bool(active)
