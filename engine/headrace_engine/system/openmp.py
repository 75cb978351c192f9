"""Sets how many threads OpenMP uses, and how long one spins before it sleeps while it waits for others.

OpenMP, which torch includes, starts one thread for each core that it may use, also where a control group gives it less
time than that: with a quota of one core and two threads, a thread often waits for one that the kernel has paused.

GNU's OpenMP spins for milliseconds by default. On a busy machine, a spinning thread uses its
time slice while the thread that it waits for is not scheduled: with two cores and one busy process, a decode step took
2 s instead of 20 ms. A short spin is as fast on an idle machine, and releases the core in time on a busy one. The
runtime reads its environment when torch is imported, so this must run before.
"""

import os
from collections.abc import Mapping

from headrace_engine.system import control_group

_SPIN_COUNT = 5000
_MOST_SPINS = 2**31 - 1


def set_defaults() -> None:
    """Set what the operator has not chosen."""
    if control_group.cpu_quota() is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(control_group.usable_cores()))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPIN_COUNT))


def spin_count(environ: Mapping[str, str]) -> int:
    """Return how often a thread of `runner/native/team.h` spins before it sleeps, by the same variables."""
    chosen = environ.get("GOMP_SPINCOUNT", "")
    if chosen.isdecimal():
        return min(int(chosen), _MOST_SPINS)
    return 0 if environ.get("OMP_WAIT_POLICY", "").lower() == "passive" and not chosen else _SPIN_COUNT
