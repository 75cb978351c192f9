"""Adds the texts of tokens to their log-probabilities, as vLLM does (LogprobsProcessor)."""

from collections.abc import Sequence
from typing import Final

from headrace_engine.requests.outputs import Logprob
from headrace_engine.runner.contracts import TokenLogprobs
from headrace_engine.text.token_pieces import REPLACEMENT, TokenPieces

_CONTEXT_TOKENS: Final = 16
"""How many of the last tokens to read. No character needs more tokens."""


class LogprobTexts:
    """Processes the candidates of one position after the other.

    If a token ends inside a character, its text is empty, and the token that completes the character has the whole
    character. So the texts of the drawn tokens add up to the output. The bytes are those that each token adds.
    """

    def __init__(
        self, pieces: TokenPieces, prompt_token_ids: Sequence[int] = (), output_token_ids: Sequence[int] = ()
    ) -> None:
        self._pieces = pieces
        self._beginning = b""
        """The bytes of the last tokens, if they end inside a character."""
        for token_id in prompt_token_ids[-_CONTEXT_TOKENS:]:
            self._advance(token_id)
        _, self._beginning = pieces.decode(self._beginning)
        for token_id in output_token_ids[-_CONTEXT_TOKENS:]:
            self._advance(token_id)

    def read(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """Return the candidates by id. The first one is the token at this position."""
        read = {token_id: self._logprob(token_id, value, rank) for token_id, value, rank in entry}
        self._advance(entry[0][0])
        return read

    def _logprob(self, token_id: int, value: float, rank: int) -> Logprob:
        piece = self._pieces[token_id]
        if isinstance(piece, str):
            text, piece = self._pieces.alone(token_id), piece.encode()
        else:
            text = self._completed(self._beginning + piece)
        return Logprob(logprob=value, rank=rank, decoded_token=text, bytes=piece)

    def _completed(self, data: bytes) -> str:
        text, rest = self._pieces.decode(data)
        is_broken = text.endswith(REPLACEMENT) and text.encode() != data
        return "" if rest or is_broken else text

    def _advance(self, token_id: int) -> None:
        piece = self._pieces[token_id]
        if isinstance(piece, str):
            self._beginning = b""
            return
        text, rest = self._pieces.decode(self._beginning + piece)
        # Invalid bytes are not carried over.
        self._beginning = (piece if REPLACEMENT in text else self._beginning + piece) if rest else b""
