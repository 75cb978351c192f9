"""`choices_to_fetch`: the rule by which a worker takes a few messages, and the next ones when its engine begins a step.

It imports nothing, so that `benchmarks/fleet_sim.py` can simulate fleets by this rule without a worker.
"""

from typing import Final

PREPARED_QUANTA: Final = 2
"""Messages of so many fetches are prepared at once. Those that are refused never reach the engine: with one fetch at a
time they are refused half as fast. With four, one worker takes half of a burst of 40."""
QUANTA_ALONE: Final = 4
"""How many times the quantum a worker takes while it is the only one of its queues. After a first turn, 64 requests at
once took 39.5 and 40.2 s with 4 choices a step, 38.4 s with 16, and 38.4 s with 64."""


def choices_to_fetch(
    *, max_num_seqs: int, quantum: int, slots_used: int, num_preparing: int, num_for_next_step: int
) -> int:
    """Return how many choices one fetch may take, at least 0.

    Args:
        max_num_seqs: choices that the engine runs at once.
        quantum: choices that are taken before the engine begins a step with them.
        slots_used: choices that the engine has.
        num_preparing: choices of messages that are taken and that the engine does not have yet.
        num_for_next_step: choices, of those that the engine has, that wait for its next step.
    """
    room = min(max_num_seqs - slots_used, PREPARED_QUANTA * quantum) - num_preparing
    return max(0, min(room, quantum - num_for_next_step))
