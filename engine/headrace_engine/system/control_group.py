"""Reads the limits that Linux's control groups (cgroups, version 1 and 2) set for this process. Imports no torch.

A process is in one group of each hierarchy, and every parent of that group limits it too. A container may not see the
parents of its own group. `root` is the folder that holds `proc` and `sys`.
"""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_ROOT: Final = Path("/")
_NO_LIMIT: Final = 1 << 60
"""Limits above this mean no limit. Version 1 reports the largest multiple of a page size that fits in 63 bits."""


class _Names(NamedTuple):
    limits: tuple[str, ...]
    used: str
    cache: str
    """The line of `memory.stat` with the page cache of the group and its children. The kernel can drop page cache."""
    events: str


_V1: Final = _Names(
    ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file", events="memory.oom_control"
)
_V2: Final = _Names(("memory.max", "memory.high"), "memory.current", "inactive_file", events="memory.events")


def memory_room(root: Path = _ROOT) -> int | None:
    """Return the bytes that this process can still take before one of its groups is full. None: nothing limits it.

    The groups count page cache as used memory. It is room all the same: the kernel drops it before an allocation fails.
    """
    names, folders = _groups("memory", root)
    rooms = []
    for folder in folders:
        limit, used = _memory_limit(names, folder), _number(folder / names.used)
        if limit is not None and used is not None:
            rooms.append(limit - used + _table(folder / "memory.stat").get(names.cache, 0))
    return max(0, min(rooms)) if rooms else None


def memory_limit(root: Path = _ROOT) -> int | None:
    """Return the lowest memory limit of this process's groups, in bytes. None: there is none."""
    names, folders = _groups("memory", root)
    return min(filter(None, (_memory_limit(names, folder) for folder in folders)), default=None)


def oom_kills(root: Path = _ROOT) -> int | None:
    """Return how many processes of this process's group the kernel has killed because memory was short.

    The root group of version 2 has no counter. In it, count the processes of the whole machine. None: not readable.
    """
    names, folders = _groups("memory", root)
    for path in (*(folder / names.events for folder in folders[:1]), root / "proc/vmstat"):
        count = _table(path).get("oom_kill")
        if count is not None:
            return count
    return None


def usable_cores(root: Path = _ROOT) -> int:
    """Return how many threads can compute at once: the number of allowed cores, or fewer under a CPU quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root)
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Return the lowest CPU quota of this process's groups, in cores. None: there is none."""
    names, folders = _groups("cpu", root)
    quotas = []
    for folder in folders:
        if names is _V2:
            quota, period = [*_words(folder / "cpu.max"), "max", "max"][:2]
        else:
            quota, period = ("".join(_words(folder / f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
        if quota.isdecimal() and period.isdecimal() and int(period):  # "max" or "-1" is no quota
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _groups(controller: str, root: Path) -> tuple[_Names, list[Path]]:
    """Return the folders of the groups that have the controller: this process's own, then its parents."""
    lines = [line.split(":", 2) for line in _lines(root / "proc/self/cgroup") if line.count(":") >= 2]
    for _, controllers, path in lines:
        if controller in controllers.split(","):
            return _V1, list(_upwards(path, controller, root))
    return _V2, [folder for number, _, path in lines if number == "0" for folder in _upwards(path, None, root)]


def _upwards(path: str, controller: str | None, root: Path) -> Iterator[Path]:
    """Yield the folder of the group at `path` of a hierarchy, then its parents. Yield nothing if it is not mounted.

    Args:
        controller: name of a controller, for its hierarchy of version 1. None: the hierarchy of version 2.
    """
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2" if controller is None else kind == "cgroup" and controller in options.split(","):
            mounted, mount_point = before.split(" ")[3:5]
            # In a container, the mount point may be its own group, although /proc has the group's path on the host.
            below = os.path.relpath(path, mounted)
            inside = "." if below.split("/")[0] == ".." else below
            top = root / mount_point.lstrip("/")
            folder = top / inside
            yield folder
            yield from (parent for parent in folder.parents if parent == top or top in parent.parents)
            return


def _memory_limit(names: _Names, folder: Path) -> int | None:
    """Return the limit of one group. Version 1 also reports the limit of parents that a container cannot see."""
    limits = [_number(folder / name) for name in names.limits]
    limits.append(_table(folder / "memory.stat").get("hierarchical_memory_limit"))
    return min((limit for limit in limits if limit is not None and limit < _NO_LIMIT), default=None)


def _number(path: Path) -> int | None:
    text = "".join(_words(path))
    return int(text) if text.isdecimal() else None


def _table(path: Path) -> dict[str, int]:
    """Read a file whose lines have a name and a number."""
    pairs = (line.split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    """Return the lines of a file, or no lines if it cannot be read: not all systems and groups have it."""
    with contextlib.suppress(OSError):
        return path.read_text().splitlines()
    return []
