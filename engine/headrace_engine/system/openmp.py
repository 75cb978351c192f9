"""Sets how many threads OpenMP uses, and how long a thread that waits for others spins before it sleeps.

torch includes OpenMP. It starts one thread for each core that it may use, even if a control group limits the processor
time. With two threads and a quota of one core, one thread often waits while the kernel has paused the other.

GNU's OpenMP spins for milliseconds by default. On a busy machine, a spinning thread uses its
time slice while the thread that it waits for is not scheduled: with two cores and one busy process, a decode step took
2 s instead of 20 ms. A short spin is as fast on an idle machine, and releases the core in time on a busy one. OpenMP
reads its environment when torch is imported, so `set_defaults` must run before.
"""

import os
from collections.abc import Mapping

from headrace_engine.system import control_group

_SPIN_COUNT = 5000
_MOST_SPINS = 2**31 - 1


def set_defaults() -> None:
    """Set the environment variables that the operator has not set."""
    if control_group.cpu_quota() is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(control_group.usable_cores()))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPIN_COUNT))


def spin_count(environ: Mapping[str, str]) -> int:
    """Return how often a thread of `runner/native/team.h` spins before it sleeps, from the same variables."""
    chosen = environ.get("GOMP_SPINCOUNT", "")
    if chosen.isdecimal():
        return min(int(chosen), _MOST_SPINS)
    return 0 if environ.get("OMP_WAIT_POLICY", "").lower() == "passive" and not chosen else _SPIN_COUNT
