"""`DecideJob`: a message whose questions are choices, each with a prompt and one token of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace_broker.decisions import DecisionResult
from headrace_broker.results import ErrorInfo, Usage
from headrace_broker.streams.events import ChunkEvent, StreamEvent
from headrace_broker.streams.writer import StreamWrite
from headrace_engine.requests.outputs import RequestOutput
from headrace_engine.text.decision_plan import DecisionPlan, answers_of
from headrace_monitoring.metrics import Publication
from headrace_wire.codes import ErrorCode, FinishReason
from headrace_workers.preparation.intake import RefusedError
from headrace_workers.requests.generate_job import ChoiceRecord, GenerateJob, recorded_choices


@dataclass(slots=True, eq=False, kw_only=True)
class DecideJob(GenerateJob):
    """Answers questions by the log-probabilities of the labels of their options.

    Args:
        choices: one for each of `plan.readings()`. Their log-probabilities are in the stream, so that a resumed job
            reads only the others.
    """

    questions: Sequence[Mapping[str, Any]]
    plan: DecisionPlan
    answers: list[dict[str, Any]] | None = field(default=None, repr=False)

    @property
    def finish_reason(self) -> FinishReason:
        return "stop"

    @property
    def num_sendable(self) -> int:
        """One until a choice is done: it fills the prefix cache with the input, which the others then find there."""
        return len(self.unsent or ()) if self.num_tokens else 1 - self.num_slots

    def publish(self, output: RequestOutput, now: float, publication: Publication) -> list[StreamWrite]:
        is_first = not self.num_tokens
        cached = self.num_cached_tokens
        writes = GenerateJob.publish(self, output, now, publication)
        # The others find the input in the prefix cache because the first one computed it.
        self.num_cached_tokens = min(output.num_cached_tokens, len(self.plan.shared)) if is_first else cached
        return writes

    def end(self, finish_reason: str, error: ErrorInfo | None = None) -> StreamWrite:
        about: dict[str, Any] = {} if error is not None else {"answers": self._answered()}
        usage = self.usage()
        return StreamWrite.end(
            *self.key, self.num_tokens, finish_reason=finish_reason, usage=usage, error=error, **about
        )

    def usage(self) -> Usage:
        return Usage(self.plan.num_tokens, self.num_cached_tokens, self.num_tokens)

    def result(self, error: ErrorInfo | None = None) -> DecisionResult:  # type: ignore[override]
        return DecisionResult(self.request_id, None if error is not None else self._answered(), self.usage(), error)

    def _answered(self) -> list[dict[str, Any]]:
        if self.answers is None:
            self.answers = answers_of(self.questions, self.plan, [_logprobs(choice) for choice in self.choices])
        return self.answers


def recorded_readings(entries: Sequence[StreamEvent], plan: DecisionPlan) -> list[ChoiceRecord]:
    """Read the choices that earlier attempts wrote to the stream.

    Raises RefusedError if they read other tokens than `plan`. Another tokenizer or release makes another plan.
    """
    readings = plan.readings()
    for entry in entries:
        if isinstance(entry, ChunkEvent):
            wanted = readings[entry.index].token_ids if 0 <= entry.index < len(readings) else None
            found = {each.token_id for position in entry.logprobs or () for each in position}
            if wanted is None or not found.issuperset(wanted):
                raise RefusedError(
                    ErrorCode.MODEL_CHANGED,
                    "the request began at a worker with another tokenizer or release, which reads other labels: "
                    "send it again under a new id",
                )
    return recorded_choices(entries, len(readings))


def _logprobs(choice: ChoiceRecord) -> dict[int, float]:
    assert choice.logprobs is not None
    return {candidate.token_id: candidate.logprob for candidate in choice.logprobs[0]}
