"""`TokenCredit`: how many messages of a pooling model to take, counted in tokens."""

from typing import Final

BYTES_PER_TOKEN: Final = 4
"""Estimates the tokens of a message before it is tokenised."""
STEPS: Final = 4
"""The engine gets work for so many steps. More would only wait here instead of at another worker."""
MESSAGES: Final = 8
"""So many messages are taken even if the engine has work: a short one need not wait for the end of long ones."""
_WEIGHT: Final = 0.25


class TokenCredit:
    """Keeps the engine's backlog at a few steps. The size of the next message is the average of the last ones.

    Args:
        step_tokens: tokens of one step.
    """

    def __init__(self, step_tokens: int) -> None:
        self._step_tokens = step_tokens
        self._most = STEPS * step_tokens
        self._average = float(self._most)

    def took(self, num_tokens: int) -> None:
        """Learn the size of a message."""
        self._average += _WEIGHT * (max(1, num_tokens) - self._average)

    @property
    def step_messages(self) -> int:
        """Number of messages that one step computes."""
        return int(self._step_tokens / self._average)

    def is_busy(self, backlog: int) -> bool:
        """Return whether the engine has work for another step after the current one."""
        return backlog >= self._step_tokens

    def messages(self, backlog: int, num_messages: int) -> int:
        """Return how many messages to take while the engine has to compute `backlog` tokens of `num_messages`.

        If the engine has enough work, they are taken one by one: other workers get some as well.
        """
        left = self._most - backlog
        return int(num_messages < MESSAGES) if left <= 0 else max(1, int(left / self._average))
