"""What the processor can do, as Linux reports it."""

import platform
from pathlib import Path


def processor_flags() -> str:
    """Return the line of /proc/cpuinfo with the processor's features. Elsewhere than on Linux: its name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
