"""Divides a packed step into groups that a recurrent layer computes at once.

A sequence is cut where a snapshot of its state is wanted. Parts of different sequences with the same number of tokens
form a group, for example all requests that decode. The second part of a sequence is in a later group than its first.

    tokens of a step   | a | b | c c c c . c c | d d |        the dot is the block border of a snapshot
    groups             | a | b |      c c c c      d d        then       c c
                       [2, 1]         [1, 4]     [1, 2]                 [1, 2]
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePart:
    """Adjacent tokens of one sequence."""

    first_row: int
    """Index of the first token in the step."""
    num_tokens: int
    is_first: bool
    """Whether the sequence begins here, without a state."""
    slot: int
    snapshot_slot: int | None = None
    """Where the state after these tokens is copied to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateGroup:
    """Parts of different sequences that a layer computes as one batch."""

    rows: torch.Tensor
    """[parts, tokens] int64: indices of the tokens in the step"""
    slots: slice | torch.Tensor
    """The slots of the parts, [parts] int64, or a slice of adjacent ones, which avoids copies."""
    is_first: bool
    snapshots: list[tuple[int, int]]
    """Slots to copy from and to, after the group."""


def split_at(part: SequencePart, borders: Iterable[tuple[int, int]]) -> list[SequencePart]:
    """Cut a part after each border: (number of its tokens, slot of the snapshot), in ascending order."""
    parts, done = [], 0
    for count, snapshot_slot in borders:
        parts.append(_between(part, done, count, snapshot_slot))
        done = count
    if done < part.num_tokens:
        parts.append(_between(part, done, part.num_tokens, None))
    return parts


def _between(part: SequencePart, start: int, end: int, snapshot_slot: int | None) -> SequencePart:
    return SequencePart(
        first_row=part.first_row + start,
        num_tokens=end - start,
        is_first=part.is_first and start == 0,
        slot=part.slot,
        snapshot_slot=snapshot_slot,
    )


def group(sequences: Iterable[list[SequencePart]]) -> list[StateGroup]:
    """Group the parts of all sequences of a step. The groups must be computed in their order."""
    together: dict[tuple[int, bool, int], list[SequencePart]] = {}
    for parts in sequences:
        for turn, part in enumerate(parts):
            together.setdefault((turn, part.is_first, part.num_tokens), []).append(part)
    return [_group(together[key]) for key in sorted(together)]


def _group(parts: list[SequencePart]) -> StateGroup:
    parts.sort(key=lambda part: part.slot)
    first = parts[0]
    slots = [part.slot for part in parts]
    are_adjacent = slots[-1] - slots[0] == len(slots) - 1
    return StateGroup(
        rows=torch.tensor([part.first_row for part in parts])[:, None] + torch.arange(first.num_tokens),
        slots=slice(slots[0], slots[-1] + 1) if are_adjacent else torch.tensor(slots),
        is_first=first.is_first,
        snapshots=[(part.slot, part.snapshot_slot) for part in parts if part.snapshot_slot is not None],
    )
