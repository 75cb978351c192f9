"""The result of a pooling task as Celery's result backend stores it, and the answer to a client's call."""

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace_broker.errors import MalformedEntryError
from headrace_broker.results import ErrorInfo, Usage
from headrace_broker.streams.events import EndEvent, RowsEvent, StreamEvent
from headrace_wire.pooling import PoolingTask

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of float32 numbers. `shape` is (rows, numbers of a row), or (rows,) if a row is one number."""

    data: bytes = field(repr=False)
    """Little-endian float32, row by row."""
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return self.shape[0]

    def tolist(self) -> list[Any]:
        """Return the rows as lists of floats, or the numbers of a matrix with one dimension."""
        numbers = array("f", self.data)
        if sys.byteorder == "big":
            numbers.byteswap()
        if len(self.shape) == 1:
            return numbers.tolist()
        width = self.shape[1]
        return [numbers[first : first + width].tolist() for first in range(0, len(numbers), width)]

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Let `numpy.asarray(matrix)` return a read-only array without a copy."""
        return {"version": 3, "typestr": "<f4", "shape": self.shape, "data": self.data}


def matrix_of(task: PoolingTask, count: int, data: bytes) -> Matrix:
    """Return `count` rows as a matrix. A score is one number."""
    width = len(data) // (_FLOAT_BYTES * count) if count else 0
    return Matrix(data, (count,) if task == "score" else (count, width))


@dataclass(frozen=True, slots=True)
class PoolingResult:
    """The rows of a message. With an `error`, `rows` may be partial, or None."""

    request_id: str
    rows: Matrix | None = None
    labels: Sequence[str] = ()
    """Of a classification: names of the classes, in the order of each row."""
    truncated: Sequence[int] = ()
    """Indices of the inputs that were cut."""
    usage: Usage | None = None
    error: ErrorInfo | None = None

    def to_wire(self) -> dict[str, Any]:
        rows = self.rows
        data = None if rows is None else {"dtype": "float32", "shape": [*rows.shape], "bytes": rows.data}
        return {
            "request_id": self.request_id,
            "data": data,
            **({"labels": [*self.labels]} if self.labels else {}),
            "truncated": [*self.truncated],
            "usage": self.usage.to_wire() if self.usage else None,
            "error": self.error.to_wire() if self.error else None,
        }


def recorded_rows(entries: Iterable[StreamEvent]) -> tuple[int, bytes]:
    """Return the number of rows in the entries of a stream, and the rows.

    Raises MalformedEntryError if the rows are not those of the first inputs, each once.
    """
    count, parts = 0, []
    for entry in entries:
        if isinstance(entry, RowsEvent):
            if entry.first != count or entry.count < 1:
                raise MalformedEntryError(f"stream entry {entry.entry_id} begins at row {entry.first}, not {count}")
            count += entry.count
            parts.append(entry.data)
    return count, b"".join(parts)


def recorded_pooling_result(
    request_id: str, task: PoolingTask, entries: Sequence[StreamEvent], ended: EndEvent
) -> PoolingResult:
    """Read the result of an ended pooling request from its stream."""
    count, data = recorded_rows(entries)
    rows = matrix_of(task, count, data) if count else None
    return PoolingResult(request_id, rows, ended.labels, ended.truncated, ended.usage, ended.error)


@dataclass(frozen=True, slots=True)
class Pooled:
    """The answer to `embed`, `score` or `classify`: one row for each input, in the order of the inputs."""

    rows: Matrix
    """Embeddings of shape (inputs, dimensions), scores of shape (inputs,) or classes of shape (inputs, labels)."""
    labels: list[str]
    """Of a classification: names of the classes."""
    truncated: list[int]
    """Indices of the inputs that were cut."""
    usage: Usage
    request_ids: list[str]
    """The messages that the call became."""


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document of `rerank`: its index among the documents, and its score."""

    index: int
    score: float


def ranking_of(scores: Sequence[float], top_n: int | None) -> list[RankedDocument]:
    """Sort documents by score, the best first; equal scores by index. None or 0 keeps all."""
    ranked = sorted(map(RankedDocument, range(len(scores)), scores), key=lambda found: (-found.score, found.index))
    return ranked[:top_n] if top_n else ranked
