"""One measurement, one process: starting it, and what the machine did meanwhile.

A measurement prints its figures as JSON on its last line. Beside them come the peak memory of its whole process tree
and how many cores everybody else used: a run that shared its machine says so.
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
    """Raises CalledProcessError where the measurement fails; its error output has been seen."""
    busy, own_before = busy_seconds(), _own_seconds()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **(env or {})})
    watch = _MemoryWatch(process.pid)
    output, _ = process.communicate()
    peak = watch.stop()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    figures: dict[str, Any] = json.loads(output.splitlines()[-1])
    others = busy_seconds() - busy - (_own_seconds() - own_before)
    return figures | {"peak_tree_rss_mib": peak, "other_cores": round(max(0.0, others) / watch.seconds, 2)}


class Loaded:
    """A measurement that continues until its input ends: it prints one line of figures for each line that it reads.

    Between two lines its processes are stopped, so that others that are loaded have the machine for themselves: some
    engines look for work all the time. None of them outlives the block that it is used in, unless this process is
    killed.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._command = command
        # In a group of its own, which ends with the first of its processes, even where that was killed.
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
        """Raises CalledProcessError where the measurement ends instead; its error output has been seen."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):  # it has ended, and so has its output
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        for answer in self._process.stdout:
            if answer.startswith('{"seconds"'):  # not what a library has to say
                figures: dict[str, Any] = json.loads(answer)
                self._signal(signal.SIGSTOP)
                return figures
        raise subprocess.CalledProcessError(self._process.wait(), self._command)

    def _end_group(self) -> None:
        """A child that outlives the first process would keep the output open, and `ask` waiting."""
        self._process.wait()
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """To all its processes, as far as there are any."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    @property
    def peak_rss_mib(self) -> float:
        """Of the whole process tree until now; memory that processes share counts in each."""
        return self._memory.peak_mib


def busy_seconds() -> float:
    """Processor time that everybody used since the machine started."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


def median(runs: Sequence[Mapping[str, Any]], name: str) -> float:
    return statistics.median(run[name] for run in runs)


def each(runs: Sequence[Mapping[str, Any]], name: str, scale: float = 1.0) -> str:
    """All runs' figures, for the table."""
    return " ".join(f"{scale * run[name]:.0f}" for run in runs)


def save(path: str, **content: Any) -> None:
    Path(path).write_text(json.dumps({"cores": os.cpu_count(), **content}, indent=1))


class _MemoryWatch(threading.Thread):
    """Samples the memory of a process and all below it."""

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
            except psutil.Error:  # somebody ended meanwhile
                continue
            self._peak = max(self._peak, total)

    def stop(self) -> float:
        """Peak of all samples, MiB; memory that processes share counts in each."""
        self._over.set()
        self.join()
        self.seconds = max(self.seconds, _SAMPLE_SECONDS)
        return self.peak_mib

    @property
    def peak_mib(self) -> float:
        return self._peak / 2**20


def processor_seconds(processes: Sequence[psutil.Process]) -> float:
    """User and system time so far, without that of their children."""
    return sum(used.user + used.system for used in (process.cpu_times() for process in processes))


def _own_seconds() -> float:
    times = psutil.Process().cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)
