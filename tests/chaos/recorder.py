"""Which inputs the engines compute, and when: pooling engines write it to a file, and take their time for each step."""

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgpack
import redis

from headrace_broker.keys import stream_key

_STEP_SECONDS: Final = 0.04
"""So that a fault finds jobs that are not complete. The model computes a step in a few milliseconds."""

# Loaded by every interpreter that finds it.
_RECORDER: Final = """
import os, sys

if "headrace_engine.core.child" in sys.orig_argv:
    import time
    from headrace_engine.core import serving

    run, worker = serving.run, os.getppid()
    record = os.open(os.environ["TEST_RECORD"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def run_recorded(make_core, read_fd, write_fd):
        def make(config):
            core = make_core(config)
            compute = core.runner.compute

            def compute_recorded(batch):
                now = time.monotonic()
                os.write(record, "".join(
                    f"{worker} {request.request_id} {request.first + index} {now}\\n"
                    for request, indices in batch.requests for index in indices
                ).encode())
                time.sleep(float(os.environ["TEST_STEP_SECONDS"]))
                return compute(batch)

            core.runner.compute = compute_recorded
            return core

        return run(make, read_fd, write_fd)

    serving.run = run_recorded
"""


@dataclass(frozen=True)
class Computed:
    """An input that an engine began to compute."""

    worker: int
    """Process id of the engine's worker."""
    index: int
    at: float
    """Monotonic seconds; all processes of the machine have this clock."""


class Record:
    """The file of the engines.

    Args:
        folder: for the file, and for the module that engines load.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._file = folder / "computed"
        self._file.touch()
        self._seen = 0
        (folder / "sitecustomize.py").write_text(_RECORDER)
        self.environ = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])),
            "TEST_RECORD": str(self._file),
            "TEST_STEP_SECONDS": str(_STEP_SECONDS),
        }

    def take(self) -> dict[str, list[Computed]]:
        """Return what was computed since the last call, by request."""
        found: dict[str, list[Computed]] = defaultdict(list)
        with self._file.open() as lines:
            lines.seek(self._seen)
            for line in lines.read().splitlines():
                worker, request_id, index, at = line.split()
                found[request_id].append(Computed(int(worker), int(index), float(at)))
            self._seen = lines.tell()
        return found


@dataclass(frozen=True)
class Chunk:
    """An entry of rows in a stream."""

    worker: int
    first: int
    count: int


@dataclass
class RowsLog:
    """The stream of a pooling job, checked against the wire contract while it is read."""

    begun: list[tuple[int, int]]
    """For each attempt, the process id of its worker and the number of rows that it found."""
    chunks: list[Chunk]
    data: bytes
    end: dict[str, Any] | None = None

    @property
    def num_rows(self) -> int:
        return sum(chunk.count for chunk in self.chunks)

    @classmethod
    def read(cls, client: "redis.Redis", request_id: str) -> "RowsLog":
        log = cls([], [], b"")
        last = (0, -1)
        for raw_id, fields in client.xrange(stream_key(request_id)):
            attempt, offset = map(int, raw_id.decode().split("-"))
            assert (attempt, offset) > last, f"{raw_id!r} after {last}"
            last = (attempt, offset)
            assert log.end is None, "an entry after the end"
            log._take(fields[b"type"], msgpack.unpackb(fields[b"data"]), offset)
        return log

    def _take(self, kind: bytes, data: dict[str, Any], offset: int) -> None:
        if kind == b"start":
            assert offset == 0
            self.begun.append((int(data["worker"].partition("@")[0].rpartition("-")[2]), self.num_rows))
        elif kind == b"chunk":
            assert data["first"] == self.num_rows, f"row {data['first']} after {self.num_rows} rows"
            self.chunks.append(Chunk(self.begun[-1][0], data["first"], data["count"]))
            self.data += data["bytes"]
            assert offset == self.num_rows, f"offset {offset} of an entry, {self.num_rows} rows so far"
        else:
            assert kind == b"end"
            assert offset == self.num_rows + 1
            self.end = data


def finished_again(computed: Sequence[Computed], log: RowsLog, arrivals: Sequence[float]) -> int:
    """Count the inputs that were computed although their rows were finished.

    A worker may not compute a row that was in the stream when it first took the job, nor one that it has written.
    Rows that another worker writes later are unknown to a worker that was frozen or cut off.

    Args:
        arrivals: when a subscriber got each chunk, in monotonic seconds.
    """
    found_by: dict[int, int] = {}
    for worker, num_rows in log.begun:
        found_by.setdefault(worker, num_rows)
    written = {
        (chunk.worker, index): at
        for chunk, at in zip(log.chunks, arrivals, strict=True)
        for index in range(chunk.first, chunk.first + chunk.count)
    }
    return sum(
        each.index < found_by[each.worker] or each.at > written.get((each.worker, each.index), each.at)
        for each in computed
    )
