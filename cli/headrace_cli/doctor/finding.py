"""`Finding`: the result of one check."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    """A name for programs, such as `redis-persistence`."""
    status: Status
    """failed: the service cannot start, or loses requests. warning: it works, but not as it should."""
    text: str
    """What was found, with the value and the limit."""
    remedy: str = ""
    """What to do. Empty if the status is ok."""


def sentence(text: object) -> str:
    """Return a text, such as an error, with one full stop."""
    return f"{str(text).rstrip('. ')}."
