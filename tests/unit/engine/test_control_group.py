"""The limits of control groups of both versions, nested and in containers, and what a real group does to an engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace_engine.system import control_group

GIB = 1 << 30
V1_UNLIMITED = 9223372036854771712

V2 = "0::{path}"
V1 = "9:name=systemd:/\n4:memory:{path}\n2:cpu,cpuacct:{path}\n0::/"
V2_MOUNT = "31 23 0:28 {root} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNTS = (
    "40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n"
    "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime master:9 - cgroup cgroup rw,memory\n"
    "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw"
)


class Machine:
    """A folder that looks like the root of a Linux machine."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def process(self, groups: str, mounts: str, *, path: str, mounted: str = "/") -> None:
        self.write("proc/self/cgroup", groups.format(path=path))
        self.write("proc/self/mountinfo", "23 1 0:1 / / rw - ext4 /dev/vda rw\n" + mounts.format(root=mounted))

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def v1_memory(self, folder: str, limit: int, used: int, cache: int = 0) -> None:
        base = f"sys/fs/cgroup/memory/{folder}"
        self.write(f"{base}/memory.limit_in_bytes", limit)
        self.write(f"{base}/memory.usage_in_bytes", used)
        self.write(f"{base}/memory.stat", f"inactive_file 1\ntotal_inactive_file {cache}")

    def v2_memory(self, folder: str, limit: object, used: int, cache: int = 0, high: object = "max") -> None:
        base = f"sys/fs/cgroup/{folder}"
        self.write(f"{base}/memory.max", limit)
        self.write(f"{base}/memory.high", high)
        self.write(f"{base}/memory.current", used)
        self.write(f"{base}/memory.stat", f"anon 5\ninactive_file {cache}")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("tight", ["a/b", "a", ""])
def test_the_tightest_of_nested_groups_of_version_1_counts(machine: Machine, tight: str) -> None:
    machine.process(V1, V1_MOUNTS, path="/a/b")
    for folder in ("a/b", "a", ""):
        machine.v1_memory(folder, GIB if folder == tight else V1_UNLIMITED, used=GIB // 2, cache=1000)
    assert control_group.memory_limit(machine.root) == GIB
    assert control_group.memory_room(machine.root) == GIB // 2 + 1000


@pytest.mark.parametrize("tight", ["a/b", "a"])
def test_the_tightest_of_nested_groups_of_version_2_counts(machine: Machine, tight: str) -> None:
    machine.process(V2, V2_MOUNT, path="/a/b")
    for folder in ("a/b", "a"):
        machine.v2_memory(folder, GIB if folder == tight else "max", used=GIB // 2, cache=1000)
    assert control_group.memory_limit(machine.root) == GIB
    assert control_group.memory_room(machine.root) == GIB // 2 + 1000


def test_the_room_of_the_fullest_group_counts_not_that_of_the_lowest_limit(machine: Machine) -> None:
    machine.process(V2, V2_MOUNT, path="/a/b")
    machine.v2_memory("a/b", GIB, used=0)
    machine.v2_memory("a", 4 * GIB, used=4 * GIB - 1000)
    assert control_group.memory_room(machine.root) == 1000


def test_the_limit_above_which_the_kernel_slows_a_group_counts_like_that_where_it_kills(machine: Machine) -> None:
    machine.process(V2, V2_MOUNT, path="/a")
    machine.v2_memory("a", 4 * GIB, used=0, high=GIB)
    assert control_group.memory_room(machine.root) == GIB


def test_a_full_group_has_no_room_rather_than_less_than_none(machine: Machine) -> None:
    machine.process(V2, V2_MOUNT, path="/a")
    machine.v2_memory("a", GIB, used=GIB + 4096)
    assert control_group.memory_room(machine.root) == 0


@pytest.mark.parametrize(("path", "mounted"), [("/docker/7", "/docker/7"), ("/", "/"), ("/docker/7", "/elsewhere")])
def test_a_container_finds_its_own_group_at_the_mount_point(machine: Machine, path: str, mounted: str) -> None:
    machine.process(V1, V1_MOUNTS, path=path, mounted=mounted)
    machine.v1_memory(".", GIB, used=0)
    assert control_group.memory_limit(machine.root) == GIB


def test_version_1_tells_a_container_the_limit_of_a_parent_that_it_cannot_see(machine: Machine) -> None:
    machine.process(V1, V1_MOUNTS, path="/pod/7", mounted="/pod/7")
    machine.v1_memory(".", V1_UNLIMITED, used=100)
    machine.write("sys/fs/cgroup/memory/memory.stat", f"hierarchical_memory_limit {GIB}")
    assert control_group.memory_room(machine.root) == GIB - 100


@pytest.mark.parametrize(("groups", "mounts"), [(V1, V1_MOUNTS), (V2, V2_MOUNT)])
def test_no_limit_is_no_limit(machine: Machine, groups: str, mounts: str) -> None:
    machine.process(groups, mounts, path="/a")
    machine.v1_memory("a", V1_UNLIMITED, used=5)
    machine.v2_memory("a", "max", used=5)
    machine.write("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", -1)
    machine.write("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", 100000)
    machine.write("sys/fs/cgroup/a/cpu.max", "max 100000")
    assert control_group.memory_limit(machine.root) is None
    assert control_group.memory_room(machine.root) is None
    assert control_group.cpu_quota(machine.root) is None


def test_a_machine_without_control_groups_has_no_limits(machine: Machine) -> None:
    assert control_group.memory_room(machine.root) is None
    assert control_group.oom_kills(machine.root) is None
    assert control_group.cpu_quota(machine.root) is None
    assert control_group.usable_cores(machine.root) == len(os.sched_getaffinity(0))


def test_kills_for_memory_are_those_of_the_own_group(machine: Machine) -> None:
    machine.write("proc/vmstat", "nr_free_pages 5\noom_kill 9")
    machine.process(V1, V1_MOUNTS, path="/a")
    machine.write("sys/fs/cgroup/memory/a/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3")
    assert control_group.oom_kills(machine.root) == 3
    machine.process(V2, V2_MOUNT, path="/b")
    machine.write("sys/fs/cgroup/b/memory.events", "low 0\noom 8\noom_kill 4\noom_group_kill 0")
    assert control_group.oom_kills(machine.root) == 4
    machine.process(V2, V2_MOUNT, path="/")  # the root group has no counter
    assert control_group.oom_kills(machine.root) == 9


@pytest.mark.parametrize(("quota", "cores"), [(50, 1), (100, 1), (101, 2), (10_000, 1000)])
def test_there_are_as_many_threads_as_the_quota_can_run(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, quota: int, cores: int
) -> None:
    allowed = 64
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(allowed))
    machine.process(V1, V1_MOUNTS, path="/a/b")
    machine.write("sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us", -1)
    machine.write("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", quota * 1000)
    for folder in ("a/b", "a"):
        machine.write(f"sys/fs/cgroup/cpu,cpuacct/{folder}/cpu.cfs_period_us", 100_000)
    assert control_group.usable_cores(machine.root) == min(cores, allowed)
    machine.process(V2, V2_MOUNT, path="/c/d")
    machine.write("sys/fs/cgroup/c/d/cpu.max", "max 100000")
    machine.write("sys/fs/cgroup/c/cpu.max", f"{quota * 500} 50000")
    assert control_group.usable_cores(machine.root) == min(cores, allowed)


# -- in a real group ---------------------------------------------------------------------------------------------------

LIMIT = 256 << 20
IN_GROUP = """
import json, os, sys
for group in sys.argv[1:]:
    open(f"{group}/cgroup.procs", "w").write(str(os.getpid()))
import headrace_engine
from headrace_engine.system import control_group
from headrace_engine.core.process import EngineCoreProcess
from headrace_engine.errors import EngineDeadError
from unit.engine.fake_runner import fake_config
core = EngineCoreProcess(fake_config(model="grows"))
try:
    core.wait_ready(60)
except EngineDeadError as error:
    failure = [error.cause, str(error)]
core.kill()
print(json.dumps([control_group.memory_limit(), control_group.memory_room(), os.environ["OMP_NUM_THREADS"], failure]))
"""


@pytest.fixture
def real_groups() -> Iterator[list[str]]:
    """Groups of 256 MiB and of one CPU."""
    made: dict[str, Path] = {}
    limits = {
        "memory": {"memory.limit_in_bytes": LIMIT, "memory.max": LIMIT, "memory.swap.max": 0},
        "cpu": {"cpu.cfs_quota_us": 100_000, "cpu.max": "100000 100000"},
    }
    try:
        for controller, files in limits.items():
            _, folders = control_group._groups(controller, Path("/"))
            if not folders:
                pytest.skip("control groups are not mounted")
            # A group of version 2 that has processes cannot have children with limits, so the new one is at the top.
            folder = folders[-1] / f"headrace-test-{os.getpid()}"
            try:
                folder.mkdir(exist_ok=True)
                made[str(folder)] = folder
                present = [name for name in files if (folder / name).exists()]
                for name in present:
                    (folder / name).write_text(str(files[name]))
            except OSError as error:
                pytest.skip(f"no control group can be made: {error}")
            if not present:
                pytest.skip(f"the controller {controller} is not enabled for new groups")
        yield list(made)
    finally:
        for folder in made.values():
            folder.rmdir()


def test_an_engine_that_outgrows_its_group_was_killed_for_memory_and_says_the_limit(
    real_groups: list[str], tests_on_path: None
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_GROUP, *real_groups],
        stdout=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
        check=True,
        text=True,
    )
    limit, room, threads, (cause, message) = json.loads(done.stdout)
    assert limit == LIMIT
    assert 0 < room < LIMIT
    assert threads == "1"
    assert cause == "out_of_memory"
    assert "killed by the kernel, because its control group, whose limit is 0.2 GiB, ran out of memory" in message
