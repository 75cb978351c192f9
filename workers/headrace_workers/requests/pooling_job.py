"""`PoolingJob`: a message whose inputs become rows of numbers. Rows are published in the order of the inputs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from headrace_broker.pooling_results import PoolingResult, matrix_of, recorded_rows
from headrace_broker.results import ErrorInfo, Usage
from headrace_broker.streams.events import StreamEvent
from headrace_broker.streams.writer import StreamWrite
from headrace_engine.core.outputs import PooledRows
from headrace_engine.requests.pooling_request import PoolingCoreRequest
from headrace_monitoring.metrics import Publication
from headrace_wire.codes import FinishReason
from headrace_workers.requests.job import Job

ENTRY_BYTES: Final = 256 * 1024
"""A stream entry has at most so many bytes of rows, unless it has one row."""


@dataclass(slots=True, eq=False, kw_only=True)
class PoolingJob(Job):
    """Args:
    request: all inputs of the message.
    """

    UNIT: ClassVar[str] = "inputs"

    request: PoolingCoreRequest
    labels: Sequence[str] = ()
    """Names of the classes."""
    truncated: Sequence[int] = ()
    """Indices of the inputs that were cut."""
    num_rows: int = 0
    rows: list[bytes] = field(default_factory=list, repr=False)
    """The published rows, of all attempts. This is their only copy in the worker."""
    num_tokens_left: int = 0

    def resume(self, entries: Sequence[StreamEvent]) -> None:
        """Take over the rows that earlier attempts wrote to the stream."""
        count, data = recorded_rows(entries)
        self.num_rows, self.rows = count, [data]
        self.num_tokens_left = sum(map(len, self.request.inputs[count:]))

    @property
    def num_tokens_held(self) -> int:
        return self.num_tokens_left

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_done(self) -> int:
        return self.num_rows

    @property
    def num_choices(self) -> int:
        return 1

    @property
    def num_unfinished(self) -> int:
        return int(self.num_rows < len(self.request.inputs))

    @property
    def num_decoded_tokens(self) -> int:
        return 0

    @property
    def depends_on_draws(self) -> bool:
        return False

    @property
    def finish_reason(self) -> FinishReason:
        return "stop"

    def core_requests(self) -> list[PoolingCoreRequest]:
        whole = self.request
        return [
            PoolingCoreRequest(
                request_id=whole.request_id,
                task=whole.task,
                inputs=whole.inputs[self.num_rows :],
                first=self.num_rows,
                second_from=whole.second_from[self.num_rows :],
                num_prompt_tokens=whole.num_prompt_tokens,
                dimensions=whole.dimensions,
                normalize=whole.normalize,
                activation=whole.activation,
                priority=whole.priority,
                tenant=whole.tenant,
                arrival_time=whole.arrival_time,
            )
        ]

    def publish(self, output: PooledRows, now: float, publication: Publication) -> list[StreamWrite]:  # noqa: ARG002
        if not output.count:
            return []
        last = self.num_rows + output.count
        publication.pooled[self.request.task] += output.count
        publication.num_truncated += sum(self.num_rows <= index < last for index in self.truncated)
        row_bytes = len(output.data) // output.count
        per_entry = max(1, ENTRY_BYTES // row_bytes)
        writes = []
        for begin in range(0, output.count, per_entry):
            count = min(per_entry, output.count - begin)
            data = output.data[begin * row_bytes : (begin + count) * row_bytes]
            writes.append(StreamWrite.rows(*self.key, self.num_rows, count, data))
            num_tokens = sum(map(len, self.request.inputs[self.num_rows : self.num_rows + count]))
            publication.num_prompt_tokens += num_tokens
            self.num_tokens_left -= num_tokens
            self.rows.append(data)
            self.num_rows += count
        return writes

    def publish_unshown(self, output: Any, publication: Publication) -> list[StreamWrite]:  # noqa: ARG002
        raise AssertionError("rows are never held back")

    def end(self, finish_reason: str, error: ErrorInfo | None = None) -> StreamWrite:
        about: dict[str, Any] = {"truncated": [*self.truncated], **({"labels": [*self.labels]} if self.labels else {})}
        return StreamWrite.end(
            *self.key, self.num_rows, finish_reason=finish_reason, usage=self.usage(), error=error, **about
        )

    def usage(self) -> Usage:
        return Usage(self.request.num_tokens, 0, 0)

    def result(self, error: ErrorInfo | None = None) -> PoolingResult:
        rows = matrix_of(self.request.task, self.num_rows, b"".join(self.rows)) if self.num_rows else None
        return PoolingResult(self.request_id, rows, self.labels, self.truncated, self.usage(), error)
