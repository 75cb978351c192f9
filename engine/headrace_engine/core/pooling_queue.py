"""`PoolingQueue`: which texts the next step computes. Imports no torch.

The best priority comes first. Within it, tenants take turns by deficit round robin (Shreedhar and Varghese 1995). A
turn adds to the tokens that a tenant may take, and the tenant takes whole texts as long as they last. The requests of a
tenant take turns in the same way, each in the order of its texts. So a request with one short text waits for few turns,
however many texts the requests before it have. A tenant's share does not depend on its number of requests.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

ALLOWANCE: Final = 512
"""Tokens that a turn adds to an allowance."""


@dataclass(slots=True)
class _Turns:
    """The allowance of a tenant or of a request."""

    allowance: int = 0
    has_turn: bool = False
    """Whether the allowance of the present turn was added. A step may end within a turn."""

    def begin_turn(self) -> None:
        if not self.has_turn:
            self.allowance += ALLOWANCE
            self.has_turn = True


@dataclass(slots=True, eq=False, kw_only=True)
class _Entry(_Turns):
    """A request."""

    request_id: str
    sizes: Sequence[int]
    """Tokens of each text."""
    share: tuple[int, str]
    next: int = 0
    """Index of the first text that no step has taken."""


@dataclass(slots=True)
class _Share(_Turns):
    """The requests of a tenant with one priority, in the order of their turns."""

    entries: deque[_Entry] = field(default_factory=deque)


class PoolingQueue:
    """The texts that wait, by request."""

    def __init__(self) -> None:
        self._shares: dict[tuple[int, str], _Share] = {}
        """By priority and tenant. No share is empty."""
        self._rings: dict[int, deque[tuple[int, str]]] = {}
        """Priority -> its shares, in the order of their turns. No ring is empty."""
        self._entries: dict[str, _Entry] = {}
        self.num_tokens = 0
        """Tokens of all texts that wait."""

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request_id: str, sizes: Sequence[int], priority: int = 0, tenant: str = "") -> None:
        """Queue the texts of a request, of `sizes` tokens. The lowest number is the best priority."""
        assert sizes and request_id not in self._entries, f"{request_id} is queued already, or has no texts"
        name = priority, tenant
        if name not in self._shares:
            self._shares[name] = _Share()
            self._rings.setdefault(priority, deque()).append(name)
        entry = self._entries[request_id] = _Entry(request_id=request_id, sizes=sizes, share=name)
        self._shares[name].entries.append(entry)
        self.num_tokens += sum(sizes)

    def remove(self, request_ids: Iterable[str]) -> None:
        """Forget the texts of requests. Unknown ids are ignored."""
        for request_id in request_ids:
            entry = self._entries.pop(request_id, None)
            if entry is not None:
                self.num_tokens -= sum(entry.sizes[entry.next :])
                share = self._shares[entry.share]
                share.entries.remove(entry)
                if not share.entries:
                    self._rings[entry.share[0]].remove(entry.share)
                    self._drop(entry.share)

    def take(self, budget: int) -> list[tuple[str, int]]:
        """Take texts for a step: pairs of request id and index of the text.

        Together they have at most `budget` tokens. A text that has more is a step of its own.
        """
        taken: list[tuple[str, int]] = []
        for priority in sorted(self._rings):
            ring = self._rings[priority]
            while ring:
                share = self._shares[ring[0]]
                room = self._take_turn(share, budget, taken)
                if not share.entries:
                    self._drop(ring.popleft())
                elif room is not None:
                    ring.rotate(-1)
                if room is None:
                    return taken
                budget = room
        return taken

    def _take_turn(self, share: _Share, budget: int, taken: list[tuple[str, int]]) -> int | None:
        """Take texts of one tenant. Return the rest of the budget, None if the next text does not fit into it."""
        share.begin_turn()
        while share.entries:
            entry = share.entries[0]
            entry.begin_turn()
            while entry.next < len(entry.sizes):
                size = entry.sizes[entry.next]
                if size > entry.allowance:
                    break
                if size > share.allowance:
                    share.has_turn = False
                    return budget
                if size > budget and taken:
                    return None
                taken.append((entry.request_id, entry.next))
                entry.next += 1
                for each in (entry, share):
                    each.allowance -= size
                budget -= size
                self.num_tokens -= size
            if entry.next == len(entry.sizes):
                share.entries.popleft()
                del self._entries[entry.request_id]
            else:
                entry.has_turn = False
                share.entries.rotate(-1)
        share.has_turn = False
        return budget

    def _drop(self, name: tuple[int, str]) -> None:
        """Forget an empty share that is in no ring, and its ring if that is empty."""
        del self._shares[name]
        if not self._rings[name[0]]:
            del self._rings[name[0]]
