"""`choices_to_fetch`: the rule by which a worker takes a few messages, and the next ones when its engine begins a step.

It imports nothing, so that `benchmarks/fleet_sim.py` can simulate fleets by this rule without a worker.
"""

from typing import Final

QUANTA_ALONE: Final = 8
"""How many times the quantum a worker takes while it is the only one of its queues, as nothing has to be divided."""

MOST_REPLACED: Final = 3
"""With short outputs many requests end in a step. Without a limit, a worker in which nearly all have ended would take a
burst while others are idle."""


def choices_to_fetch(
    *,
    max_num_seqs: int,
    quantum: int,
    slots_used: int,
    num_preparing: int,
    num_slow: int,
    num_for_next_step: int,
    num_ended: int,
) -> int:
    """Return how many choices one fetch may take, at least 0.

    Args:
        max_num_seqs: choices that the engine runs at once.
        quantum: choices that are taken before the engine begins a step with them.
        slots_used: choices that the engine has.
        num_preparing: choices of messages that are taken and that the engine does not have yet.
        num_slow: those of them that take long to prepare. Every second one does not count, so that a few do not keep
            other messages from the engine.
        num_for_next_step: choices, of those that the engine has, that wait for its next step.
        num_ended: choices that ended with the last step. As many may replace them, besides the quantum, up to
            `MOST_REPLACED` quanta.
    """
    allowed = quantum + min(num_ended, MOST_REPLACED * quantum)
    taken = num_preparing - (num_slow + 1) // 2 + num_for_next_step
    return max(0, min(max_num_seqs - slots_used - num_preparing, allowed - taken))
