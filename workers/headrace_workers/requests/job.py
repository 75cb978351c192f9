"""`Job`: one message that this worker holds, from its claim to its acknowledgement."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace_broker.models.identity import ModelIdentity
from headrace_broker.results import (
    ChoiceOutput,
    ErrorInfo,
    GenerateResult,
    PromptLogprobs,
    TokenLogprob,
    TokenLogprobs,
    Usage,
)
from headrace_broker.streams.events import ChunkEvent, EndEvent, StartEvent, StreamEvent
from headrace_broker.streams.writer import Attempt, StreamWrite
from headrace_engine.api.input_processor import ProcessedRequest
from headrace_engine.requests.outputs import CompletionOutput, Logprob, RequestOutput
from headrace_engine.requests.request import EngineCoreRequest
from headrace_workers.preparation.celery_request import CeleryRequest


@dataclass(slots=True)
class ChoiceRecord:
    """The published output of one choice, of all attempts. This is its only copy in the worker."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    last_token_at: float | None = None
    """Monotonic time at which this worker published the choice's last token."""

    def add(self, token_ids: Sequence[int], text: str, logprobs: TokenLogprobs | None) -> None:
        self.token_ids += token_ids
        self.text += text
        if logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += logprobs

    def to_output(self, index: int) -> ChoiceOutput:
        return ChoiceOutput(index, self.text, self.token_ids, self.logprobs, self.finish_reason, self.stop_reason)


@dataclass(slots=True, eq=False)
class Job:
    """Connects a Celery request, an engine request and a stream."""

    celery_request: CeleryRequest
    request: ProcessedRequest
    attempt: int
    choices: list[ChoiceRecord]
    queued_at: float | None
    """When the message became available to workers, by the monotonic clock; None if unknown."""
    tenant: str | None = None
    abandon_after: float | None = None
    """Seconds without a subscriber heartbeat after which the request is cancelled."""
    span: Any = None
    """OpenTelemetry's span, while the request is traced; see `tracing.py`."""
    trace_id: str | None = None
    """Id of the recorded trace, used as the exemplar of the request's latencies."""
    received_at: float = field(default_factory=time.monotonic)
    admitted_at: float | None = None
    """Monotonic time at which the engine began the request's first step."""
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_first_tokens: int = 0
    """Number of tokens at `first_token_at`, including those of earlier attempts."""
    num_cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    """Published with choice 0's first token, by this attempt or an earlier one."""
    model: ModelIdentity | None = None
    """The weights that this attempt computes with."""
    begun_with: ModelIdentity | None = None
    """Other weights that computed tokens of an earlier attempt; None if there were none."""
    drawn_with: set[str] = field(default_factory=set)
    """Names of the draws that chose the tokens of earlier attempts, if their workers reported them."""
    engine_losses: int = 0
    """Number of engine processes, on any worker, that died with this request in them."""
    step: int = 0
    """Priority step of the list that held the message."""
    preemptions: int = 0
    """How often the request was preempted."""
    unsent: list[EngineCoreRequest] | None = None
    """Choices that wait for a slot of the engine; None while no choice of the request may be sent."""
    timers: list[Any] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def log_fields(self) -> dict[str, Any]:
        """Fields of every log line about this request."""
        return {"request_id": self.request_id, "attempt": self.attempt}

    @property
    def key(self) -> Attempt:
        return self.request.request_id, self.attempt

    @property
    def num_tokens(self) -> int:
        return sum([len(choice.token_ids) for choice in self.choices])  # called for each chunk: faster than a generator

    @property
    def decode_seconds(self) -> float | None:
        """Seconds from this worker's first to its last token."""
        if self.first_token_at is None or self.last_token_at is None:
            return None
        return self.last_token_at - self.first_token_at

    @property
    def num_unfinished(self) -> int:
        return [choice.finish_reason for choice in self.choices].count(None)

    @property
    def num_slots(self) -> int:
        """Number of choices that the engine runs."""
        return 0 if self.unsent is None else self.num_unfinished - len(self.unsent)

    def core_requests(self) -> list[EngineCoreRequest]:
        """Make the requests for the engine that continue each unfinished choice at its next token."""
        todo = []
        for choice, core_request in zip(self.choices, self.request.choices, strict=True):
            if choice.finish_reason is None:
                core_request.output_token_ids = list(choice.token_ids)
                todo.append(core_request)
        return todo

    def take(self, output: CompletionOutput, request_output: RequestOutput | None = None) -> StreamWrite:
        """Record new output of one choice and return the chunk that publishes it.

        Args:
            request_output: the request's output that `output` is a part of.
        """
        choice = self.choices[output.index]
        logprobs = None if output.logprobs is None else [_candidates(entry) for entry in output.logprobs]
        prompt_logprobs: PromptLogprobs | None = None
        if request_output is not None and request_output.prompt_logprobs is not None and output.index == 0:
            entries = request_output.prompt_logprobs
            prompt_logprobs = [None if entry is None else _candidates(entry) for entry in entries]
            self.prompt_logprobs = prompt_logprobs
        choice.add(output.token_ids, output.text, logprobs)
        choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_reason
        return StreamWrite.chunk(
            self.request_id,
            self.attempt,
            self.num_tokens,
            index=output.index,
            token_ids=output.token_ids,
            text=output.text,
            logprobs=logprobs,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            prompt_logprobs=prompt_logprobs,
        )

    def end(self, finish_reason: str, error: ErrorInfo | None = None) -> StreamWrite:
        return StreamWrite.end(*self.key, self.num_tokens, finish_reason=finish_reason, usage=self.usage(), error=error)

    def usage(self) -> Usage:
        return Usage(len(self.request.prompt_token_ids), self.num_cached_tokens, self.num_tokens)

    def result(self, error: ErrorInfo | None = None) -> GenerateResult:
        outputs = [choice.to_output(index) for index, choice in enumerate(self.choices)]
        return GenerateResult(self.request_id, outputs, self.usage(), error, self.prompt_logprobs)

    def summary(self) -> dict[str, Any]:
        """Describe the request to an operator, without its contents."""
        return {**self.log_fields, "tokens": self.num_tokens, "seconds": time.monotonic() - self.received_at}

    def cancel_timers(self) -> None:
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()


def recorded_choices(entries: Sequence[StreamEvent], count: int) -> list[ChoiceRecord]:
    """Read the choices that earlier attempts wrote to the stream."""
    choices = [ChoiceRecord() for _ in range(count)]
    for entry in entries:
        if isinstance(entry, ChunkEvent) and 0 <= entry.index < count:
            choice = choices[entry.index]
            choice.add(entry.token_ids, entry.text, entry.logprobs)
            choice.finish_reason, choice.stop_reason = entry.finish_reason, entry.stop_reason
    return choices


def recorded_result(request_id: str, entries: Sequence[StreamEvent], ended: EndEvent) -> GenerateResult:
    """Read the result of an ended request from its stream."""
    count = 1 + max((entry.index for entry in entries if isinstance(entry, ChunkEvent)), default=-1)
    choices = recorded_choices(entries, count)
    outputs = [choice.to_output(index) for index, choice in enumerate(choices)]
    return GenerateResult(request_id, outputs, ended.usage, ended.error, recorded_prompt_logprobs(entries))


def recorded_usage(entries: Sequence[StreamEvent]) -> Usage | None:
    """Return the usage that the entries of a stream show; None if they have no tokens."""
    num_tokens = sum(len(entry.token_ids) for entry in entries if isinstance(entry, ChunkEvent))
    if not num_tokens:
        return None
    prompt_tokens = max((entry.prompt_tokens or 0 for entry in entries if isinstance(entry, StartEvent)), default=0)
    return Usage(prompt_tokens, 0, num_tokens)


def recorded_prompt_logprobs(entries: Sequence[StreamEvent]) -> PromptLogprobs | None:
    """Read the prompt logprobs of an earlier attempt. The engine computes them with the first token only."""
    found = (entry.prompt_logprobs for entry in entries if isinstance(entry, ChunkEvent))
    return next((logprobs for logprobs in found if logprobs is not None), None)


def _candidates(entry: Mapping[int, Logprob]) -> list[TokenLogprob]:
    return [
        TokenLogprob(token_id, found.logprob, found.rank or 0, found.decoded_token, found.bytes)
        for token_id, found in entry.items()
    ]
