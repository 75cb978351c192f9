"""Drafts without a model: the tokens that followed the last n-gram where it occurred before, in prompt or output.

Prompt lookup decoding (Saxena 2023). The tokens of a request are one byte string, so a search runs at the speed of
memory. A request that never repeats itself takes one scan of the string in each step.
"""

from array import array
from collections.abc import Sequence

_TYPE = "i"
_WIDTH = array(_TYPE).itemsize


class NgramProposer:
    """
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
        """Return what followed the latest earlier occurrence of the longest possible n-gram; empty without one.

        `token_ids` only grows between calls with the same id. If the occurrence overlaps the end, the repetition is
        continued: a short cycle gives a full draft too.
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
        """Return the index of the token after the match."""
        found: int | None = None
        length = len(text) // _WIDTH
        end = length - 1  # an occurrence must end before the last token
        for n in range(self._min_n, min(self._max_n, length - 1) + 1):
            # A longer match ends where a shorter one does, so the search continues from there.
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
        limit = place + len(wanted) - 1  # bytes of two adjacent tokens, not a token
