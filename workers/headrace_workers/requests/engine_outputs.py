"""Readers of an engine's outputs: they turn the outputs of a step into outputs of jobs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace_engine.api.output_processor import OutputProcessor
from headrace_engine.core.outputs import EngineCoreOutputs, PooledRows
from headrace_engine.text.tokenizer import ModelTokenizer
from headrace_workers.requests.generate_job import GenerateJob
from headrace_workers.requests.pooling_job import PoolingJob


@dataclass(slots=True)
class JobOutput:
    """New output of one job."""

    request_id: str
    output: Any
    """For `Job.publish`."""
    finished: bool
    error: str | None = None


@dataclass(slots=True)
class ReadOutputs:
    """What the outputs of a step are for jobs."""

    outputs: list[JobOutput]
    finished_choice_ids: Sequence[str] = field(default_factory=list)
    """Engine requests that ended here. The caller must abort them in the engine."""


class OutputReader(Protocol):
    """Expects the outputs of jobs that were sent to the engine."""

    @property
    def holds_back(self) -> bool:
        """Whether there is output that no call of `read` has returned."""

    def __len__(self) -> int:
        """Return the number of jobs that have more output to come."""

    def expect(self, job: Any) -> None:
        """Prepare for the outputs of the job's unfinished part."""

    def abort(self, request_id: str) -> tuple[Any | None, Sequence[str]] | None:
        """Forget a job. Return its output that was held back, and its engine requests; None if it is unknown."""

    def read(self, outputs: EngineCoreOutputs | None, *, hold_back: bool) -> ReadOutputs:
        """Return the outputs of jobs, of a step and of what was held back before. `hold_back` keeps what can wait."""


class TextOutputs:
    """Turns tokens into text."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._processor = OutputProcessor(tokenizer)

    @property
    def holds_back(self) -> bool:
        return bool(self._processor.holds_back)

    def __len__(self) -> int:
        return len(self._processor)

    def expect(self, job: GenerateJob) -> None:
        ended = [index for index, choice in enumerate(job.choices) if choice.finish_reason is not None]
        self._processor.add_request(job.request, ended)

    def abort(self, request_id: str) -> tuple[Any | None, Sequence[str]] | None:
        return self._processor.abort(request_id)

    def read(self, outputs: EngineCoreOutputs | None, *, hold_back: bool) -> ReadOutputs:
        processed = self._processor.process(outputs.outputs if outputs is not None else (), hold_back=hold_back)
        found = [
            JobOutput(output.request_id, output, output.finished, output.error) for output in processed.request_outputs
        ]
        return ReadOutputs(found, processed.finished_choice_ids)


class RowOutputs:
    """Passes rows on."""

    holds_back = False

    def __init__(self) -> None:
        self._jobs: dict[str, PoolingJob] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def expect(self, job: PoolingJob) -> None:
        self._jobs[job.request_id] = job

    def abort(self, request_id: str) -> tuple[Any | None, Sequence[str]] | None:
        return None if self._jobs.pop(request_id, None) is None else (None, [request_id])

    def read(self, outputs: EngineCoreOutputs | None, *, hold_back: bool) -> ReadOutputs:  # noqa: ARG002
        read = [self._read(rows) for rows in (outputs.rows if outputs is not None else ())]
        return ReadOutputs([output for output in read if output is not None])

    def _read(self, rows: PooledRows) -> JobOutput | None:
        job = self._jobs.get(rows.request_id)
        if job is None or rows.first != job.num_done:  # rows of an attempt that was aborted meanwhile
            return None
        if rows.is_last or rows.error is not None:
            del self._jobs[rows.request_id]
        return JobOutput(rows.request_id, rows, rows.is_last or rows.error is not None, rows.error)


def reader_for(*, pools: bool, tokenizer: ModelTokenizer) -> OutputReader:
    """Return the reader of a model's outputs."""
    return RowOutputs() if pools else TextOutputs(tokenizer)
