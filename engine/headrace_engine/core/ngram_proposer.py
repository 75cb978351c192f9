"""Drafts without a model: what followed the last tokens when they occurred before, in prompt or output.

Prompt lookup decoding (Saxena 2023). A request's tokens are kept as one byte string, so that a search runs at
memory speed; a request that never repeats itself costs one scan of it a step.
"""

from array import array
from collections.abc import Sequence

_TYPE = "i"
_WIDTH = array(_TYPE).itemsize


class NgramProposer:
    """
    Args:
        num_tokens: most tokens a draft.
        min_n: fewest last tokens that must be found again.
        max_n: most last tokens that are looked for.
    """

    def __init__(self, num_tokens: int, min_n: int, max_n: int) -> None:
        self._num_tokens = num_tokens
        self._min_n = min_n
        self._max_n = max_n
        self._texts: dict[str, bytearray] = {}
        """Tokens of each request, as bytes."""

    def propose(self, request_id: str, token_ids: Sequence[int]) -> list[int]:
        """The continuation of the latest earlier occurrence of the longest n-gram at the end; empty without one.

        `token_ids` only ever grows between calls with the same id. Where the occurrence reaches into the end itself
        the repetition is carried on, so a short cycle still gives a full draft.
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
        """Index of the token behind the match."""
        found: int | None = None
        length = len(text) // _WIDTH
        end = length - 1  # an occurrence must end before the last token
        for n in range(self._min_n, min(self._max_n, length - 1) + 1):
            # A longer match ends where a shorter one does, so the search never starts anew.
            place = _rfind(text, text[(length - n) * _WIDTH :], end)
            if place is None:
                break
            found = end = place + n
        return found


def _rfind(text: bytearray, wanted: bytearray, end: int) -> int | None:
    """Index of the last occurrence that ends at or before token `end`."""
    limit = end * _WIDTH
    while True:
        place = text.rfind(wanted, 0, limit)
        if place < 0:
            return None
        if place % _WIDTH == 0:
            return place // _WIDTH
        limit = place + len(wanted) - 1  # the bytes of two neighbours, not a token
