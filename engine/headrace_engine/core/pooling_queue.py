"""`PoolingQueue`: which texts the next step computes. Imports no torch.

The best priority comes first. Among its requests, turns are given by deficit round robin (Shreedhar and Varghese 1995):
a turn adds to the tokens that a request may take, and it takes whole texts in their order as long as they last. So a
request with one short text waits for few turns, however many texts the requests before it have.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

ALLOWANCE: Final = 512
"""Tokens that a turn adds to the allowance of a request."""


@dataclass(slots=True)
class _Entry:
    request_id: str
    sizes: Sequence[int]
    """Tokens of each text."""
    priority: int
    next: int = 0
    """Index of the first text that no step has taken."""
    allowance: int = 0
    has_turn: bool = False
    """Whether the allowance of the present turn was added. A step may end within a turn."""


class PoolingQueue:
    """The texts that wait, by request."""

    def __init__(self) -> None:
        self._rings: dict[int, deque[_Entry]] = {}
        """Priority -> its requests, in the order of their turns. There are no empty rings."""
        self._entries: dict[str, _Entry] = {}
        self.num_tokens = 0
        """Tokens of all texts that wait."""

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request_id: str, sizes: Sequence[int], priority: int = 0) -> None:
        """Queue the texts of a request, of `sizes` tokens. The lowest number is the best priority."""
        assert sizes and request_id not in self._entries, f"{request_id} is queued already, or has no texts"
        entry = self._entries[request_id] = _Entry(request_id, sizes, priority)
        self._rings.setdefault(priority, deque()).append(entry)
        self.num_tokens += sum(sizes)

    def remove(self, request_ids: Iterable[str]) -> None:
        """Forget the texts of requests. Unknown ids are ignored."""
        for request_id in request_ids:
            entry = self._entries.pop(request_id, None)
            if entry is not None:
                self.num_tokens -= sum(entry.sizes[entry.next :])
                self._rings[entry.priority].remove(entry)
                self._drop_empty_ring(entry.priority)

    def take(self, budget: int) -> list[tuple[str, int]]:
        """Take texts for a step: pairs of request id and index of the text.

        Together they have at most `budget` tokens. A text that has more is a step of its own.
        """
        taken: list[tuple[str, int]] = []
        for priority in sorted(self._rings):
            ring = self._rings[priority]
            while ring:
                entry = ring[0]
                room = self._take_turn(entry, budget, taken)
                if entry.next == len(entry.sizes):
                    ring.popleft()
                    del self._entries[entry.request_id]
                elif room is not None:
                    ring.rotate(-1)
                if room is None:
                    self._drop_empty_ring(priority)
                    return taken
                budget = room
            self._drop_empty_ring(priority)
        return taken

    def _take_turn(self, entry: _Entry, budget: int, taken: list[tuple[str, int]]) -> int | None:
        """Take texts of one request. Return the rest of the budget, None if the next text does not fit into it."""
        if not entry.has_turn:
            entry.allowance += ALLOWANCE
            entry.has_turn = True
        while entry.next < len(entry.sizes):
            size = entry.sizes[entry.next]
            if size > entry.allowance:
                break
            if size > budget and taken:
                return None
            taken.append((entry.request_id, entry.next))
            entry.next += 1
            entry.allowance -= size
            budget -= size
            self.num_tokens -= size
        entry.has_turn = False
        return budget

    def _drop_empty_ring(self, priority: int) -> None:
        if not self._rings[priority]:
            del self._rings[priority]
