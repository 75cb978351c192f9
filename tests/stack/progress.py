"""What the program says while it runs: each line begins with the seconds since its start."""

import sys
import time
from typing import Final

_STARTED: Final = time.monotonic()


def elapsed() -> float:
    """Return the seconds since the start of the program."""
    return time.monotonic() - _STARTED


def progress(line: str) -> None:
    print(f"{elapsed():6.0f} s  {line}", file=sys.stderr, flush=True)
