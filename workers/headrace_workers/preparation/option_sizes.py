"""Limits for the options of callbacks. Celery copies those of a group, chain or chord into each of its members."""

from typing import Any, Final

from headrace_wire.errors import InvalidRequestError

MAX_VALUES: Final = 10_000
"""Limit for the values in the options of one signature."""
MAX_COPIED_BYTES: Final = 16 << 20
"""Limit for the bytes of options that Celery may copy for one message, if each signature got the largest ones."""


class OptionSizes:
    """Adds up the options of a message's signatures. Raises InvalidRequestError for what would take seconds to send."""

    def __init__(self) -> None:
        self._num_signatures = 0
        self._largest = 0

    def add(self, options: Any, *, has_members: bool) -> None:
        """Count the options of one signature."""
        num_values, num_bytes = _size(options)
        if num_values > MAX_VALUES:
            raise InvalidRequestError(f"options of a callback must hold at most {MAX_VALUES} values")
        self._num_signatures += 1
        if has_members:
            self._largest = max(self._largest, num_bytes)
        if self._largest * self._num_signatures > MAX_COPIED_BYTES:
            raise InvalidRequestError("the options of a group, chain or chord are too large for so many callbacks")


def _size(options: Any) -> tuple[int, int]:
    """Return the number of values, at most one more than allowed, and about how many bytes they take."""
    pending, num_values, num_bytes = [options], 0, 0
    while pending and num_values <= MAX_VALUES:
        value = pending.pop()
        num_values += 1
        num_bytes += len(value) if isinstance(value, str | bytes) else 8
        if isinstance(value, dict):
            pending += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            pending += value
    return num_values + len(pending), num_bytes
