"""The rows that an engine under test sends for a request, and the checks of each of its outputs."""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace_engine.conformance.case import expect
from headrace_engine.core.outputs import PooledRows
from headrace_engine.requests.pooling_request import PoolingCoreRequest

_TOLERANCE = 1e-4


@dataclass(slots=True)
class Rows:
    """The outputs of a pooling request so far."""

    request: PoolingCoreRequest
    data: list[bytes] = field(default_factory=list)
    """One entry for each row."""
    has_ended: bool = False
    error: str | None = None
    is_aborted: bool = False
    first_step: int = 0
    """Index of the step with its first row, counted from the last `settle`."""
    last_step: int = 0

    @property
    def id(self) -> str:
        return self.request.request_id

    def take(self, output: PooledRows, step: int) -> None:
        """Add the output of a step. Raises Broken if it does not follow the earlier ones."""
        who = f"request {self.id}"
        if self.is_aborted:
            return  # steps that had begun may still send rows
        expect(not self.has_ended, f"{who} has rows after its end")
        next_row = self.request.first + len(self.data)
        if output.error is None:
            expect(output.first == next_row, f"{who} has row {output.first} where row {next_row} must follow")
            expect(output.count > 0, f"{who} has an output without rows")
        else:
            expect(output.is_last, f"{who} continues after its error")
            expect(not output.count, f"{who} has rows and an error in one output")
        if output.count:
            size = len(output.data) // output.count
            expect(size and size % 4 == 0, f"{who} has {output.count} rows of {len(output.data)} bytes")
            rows = [output.data[begin : begin + size] for begin in range(0, len(output.data), size)]
            expect(all(map(_is_finite, rows)), f"{who} has a row that is not finite")
            self.first_step = self.first_step or step
            self.data += rows
        self.last_step, self.has_ended, self.error = step, output.is_last, output.error
        if output.is_last and output.error is None:
            count = len(self.request.inputs)
            expect(len(self.data) == count, f"{who} has {len(self.data)} rows for {count} inputs")


def numbers_of(row: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(row) // 4}f", row)


def expect_equal_rows(found: Sequence[bytes], expected: Sequence[bytes], what: str, *, exactly: bool) -> None:
    """Raise Broken unless the rows are equal: their bytes, or their numbers to 1e-4 of the largest one."""
    expect(len(found) == len(expected), f"{what}: {len(found)} rows, expected {len(expected)}")
    for index, (new, old) in enumerate(zip(found, expected, strict=True)):
        if new == old:
            continue
        expect(not exactly, f"{what}: row {index} has other bytes, but batch_invariant is claimed")
        expect(len(new) == len(old), f"{what}: row {index} has another length")
        pairs = [*zip(numbers_of(new), numbers_of(old), strict=True)]
        apart = max(abs(one - other) for one, other in pairs)
        largest = max(abs(other) for _, other in pairs)
        expect(apart <= _TOLERANCE * max(1.0, largest), f"{what}: row {index} differs by {apart:.1e}")


def _is_finite(row: bytes) -> bool:
    return all(map(math.isfinite, numbers_of(row)))
