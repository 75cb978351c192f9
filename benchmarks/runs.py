"""Runs each measurement in its own process, and records the load of the machine meanwhile.

A measurement prints its figures as JSON on its last line. `run` adds the peak memory of its whole process tree, and the
number of cores that other processes used, which shows whether a run shared its machine.
"""

import json
import os
import signal
import statistics
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil

_SAMPLE_SECONDS = 0.25
_END_SECONDS = 30.0


def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a measurement; return its figures. Raises CalledProcessError if it fails. Its stderr is not captured."""
    busy, own_before = busy_seconds(), _own_seconds()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **(env or {})})
    watch = _MemoryWatch(process.pid)
    output, _ = process.communicate()
    peak = watch.stop()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    figures: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    others = busy_seconds() - busy - (_own_seconds() - own_before)
    return figures | {"peak_tree_rss_mib": peak, "other_cores": round(max(0.0, others) / watch.seconds, 2)}


class Loaded:
    """A measurement that runs until its input ends. It prints one line of figures for each line that it reads.

    Between two lines its processes are stopped, so that other loaded measurements have the machine for themselves: some
    engines look for work all the time. No process outlives the `with` block, unless this process is killed.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._command = command
        # A process group of its own. `_end_group` kills the group when its first process ends, even if that was killed.
        options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        options |= {"start_new_session": True, "env": {**os.environ, **(env or {})}}
        self._process = subprocess.Popen(command, **options)
        self._memory = _MemoryWatch(self._process.pid)
        self._ending = threading.Thread(target=self._end_group, daemon=True)
        self._ending.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGCONT)
        try:
            with suppress(BrokenPipeError, subprocess.TimeoutExpired):
                self._process.communicate(timeout=_END_SECONDS)
        finally:
            self._process.kill()
            self._ending.join()
            self._memory.stop()

    def ask(self, line: str) -> dict[str, Any]:
        """Send a line; return the figures. Raises CalledProcessError if the measurement ends instead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):  # the process has ended, so its output ends too
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        for answer in self._process.stdout:
            if answer.startswith('{"seconds"'):  # skip the output of libraries
                figures: dict[str, Any] = json.loads(answer)
                self._signal(signal.SIGSTOP)
                return figures
        raise subprocess.CalledProcessError(self._process.wait(), self._command)

    def _end_group(self) -> None:
        """Kill the group after its first process has ended. A child would keep the output open and block `ask`."""
        self._process.wait()
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the group, if there are any."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    @property
    def peak_rss_mib(self) -> float:
        """Peak memory of the whole process tree until now. Shared memory counts in each process."""
        return self._memory.peak_mib


def busy_seconds() -> float:
    """Return the processor seconds that all processes have used since the machine started."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


def median(runs: Sequence[Mapping[str, Any]], name: str) -> float:
    return statistics.median(run[name] for run in runs)


def each(runs: Sequence[Mapping[str, Any]], name: str, scale: float = 1.0) -> str:
    """Return the figures of all runs as text, for the table."""
    return " ".join(f"{scale * run[name]:.0f}" for run in runs)


def save(path: str, **content: Any) -> None:
    Path(path).write_text(json.dumps({"cores": os.cpu_count(), **content}, indent=1))


class _MemoryWatch(threading.Thread):
    """Samples the memory of a process and of all its descendants."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._root = psutil.Process(pid)
        self._over = threading.Event()
        self._peak = 0
        self.seconds = 0.0
        self.start()

    def run(self) -> None:
        while not self._over.wait(_SAMPLE_SECONDS):
            self.seconds += _SAMPLE_SECONDS
            total = 0
            try:
                for process in [self._root, *self._root.children(recursive=True)]:
                    total += process.memory_info().rss
            except psutil.Error:  # a process ended meanwhile
                continue
            self._peak = max(self._peak, total)

    def stop(self) -> float:
        """Stop. Return the peak of all samples in MiB. Shared memory counts in each process."""
        self._over.set()
        self.join()
        self.seconds = max(self.seconds, _SAMPLE_SECONDS)
        return self.peak_mib

    @property
    def peak_mib(self) -> float:
        return self._peak / 2**20


def processor_seconds(processes: Sequence[psutil.Process]) -> float:
    """Return the user and system seconds of these processes so far, without those of their children."""
    return sum(used.user + used.system for used in (process.cpu_times() for process in processes))


def _own_seconds() -> float:
    times = psutil.Process().cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)
