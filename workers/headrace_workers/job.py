"""`Job`: one message in this worker's hands, from its claim to its acknowledgement."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace_broker.events import ChunkEvent, EndEvent, StartEvent, StreamEvent
from headrace_broker.model_identity import ModelIdentity
from headrace_broker.results import (
    CompletionOutput,
    ErrorInfo,
    GenerateResult,
    Logprob,
    PromptLogprobs,
    TokenLogprobs,
    Usage,
)
from headrace_broker.streams import Attempt, StreamWrite
from headrace_engine.input_processor import ProcessedRequest
from headrace_engine.outputs import CompletionOutput as EngineOutput
from headrace_engine.outputs import Logprob as EngineLogprob
from headrace_engine.outputs import RequestOutput
from headrace_engine.request import EngineCoreRequest
from headrace_workers.celery_request import CeleryRequest


@dataclass(slots=True)
class ChoiceRecord:
    """What one choice has published so far, all attempts together. Nothing else keeps it while the request runs."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    last_token_at: float | None = None
    """When this worker published its last one."""

    def add(self, token_ids: Sequence[int], text: str, logprobs: TokenLogprobs | None) -> None:
        self.token_ids += token_ids
        self.text += text
        if logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += logprobs

    def to_output(self, index: int) -> CompletionOutput:
        return CompletionOutput(index, self.text, self.token_ids, self.logprobs, self.finish_reason, self.stop_reason)


@dataclass(slots=True, eq=False)
class Job:
    """The bridge between a Celery request, an engine request and a stream."""

    celery_request: CeleryRequest
    request: ProcessedRequest
    attempt: int
    choices: list[ChoiceRecord]
    queued_at: float | None
    """Since when the message could have been taken, by the monotonic clock; None where nothing tells."""
    tenant: str | None = None
    abandon_after: float | None = None
    """Seconds; the request is cancelled when nobody has listened for so long."""
    span: Any = None
    """OpenTelemetry's, while the request is traced; see `tracing.py`."""
    trace_id: str | None = None
    """Of the trace that is recorded; an exemplar of the request's latencies."""
    received_at: float = field(default_factory=time.monotonic)
    admitted_at: float | None = None
    """When the engine began its first step."""
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_first_tokens: int = 0
    """How many tokens were there at `first_token_at`, those of earlier attempts among them."""
    num_cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    """Published with choice 0's first token, by this attempt or an earlier one."""
    model: ModelIdentity | None = None
    """Which weights this attempt computes with."""
    begun_with: ModelIdentity | None = None
    """Others, with which an earlier attempt has computed tokens; None where there were none."""
    drawn_with: set[str] = field(default_factory=set)
    """Names of the draws behind the tokens of earlier attempts, as far as their workers said."""
    engine_losses: int = 0
    """How many engine processes, of any worker, died with this request in them."""
    step: int = 0
    """Priority step of the list that the message came by."""
    preemptions: int = 0
    """How often it made room for requests of better levels."""
    timers: list[Any] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def log_fields(self) -> dict[str, Any]:
        """What every log line about this request carries."""
        return {"request_id": self.request_id, "attempt": self.attempt}

    @property
    def key(self) -> Attempt:
        return self.request.request_id, self.attempt

    @property
    def num_tokens(self) -> int:
        return sum([len(choice.token_ids) for choice in self.choices])  # asked for each chunk: no generator

    @property
    def decode_seconds(self) -> float | None:
        """From this worker's first to its last token."""
        if self.first_token_at is None or self.last_token_at is None:
            return None
        return self.last_token_at - self.first_token_at

    @property
    def num_unfinished(self) -> int:
        return [choice.finish_reason for choice in self.choices].count(None)

    def core_requests(self) -> list[EngineCoreRequest]:
        """What the engine still has to do, from the next token of each choice on."""
        todo = []
        for choice, core_request in zip(self.choices, self.request.choices, strict=True):
            if choice.finish_reason is None:
                core_request.output_token_ids = list(choice.token_ids)
                todo.append(core_request)
        return todo

    def take(self, output: EngineOutput, request_output: RequestOutput | None = None) -> StreamWrite:
        """Record news of one choice and return the chunk that publishes it.

        Args:
            request_output: what the choice's news came in.
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
        return StreamWrite.end(
            self.request_id,
            self.attempt,
            self.num_tokens,
            finish_reason=finish_reason,
            usage=self.usage(),
            error=error,
        )

    def usage(self) -> Usage:
        return Usage(len(self.request.prompt_token_ids), self.num_cached_tokens, self.num_tokens)

    def result(self, error: ErrorInfo | None = None) -> GenerateResult:
        outputs = [choice.to_output(index) for index, choice in enumerate(self.choices)]
        return GenerateResult(self.request_id, outputs, self.usage(), error, self.prompt_logprobs)

    def summary(self) -> dict[str, Any]:
        """For an operator: nothing of what the request says."""
        return {
            "request_id": self.request_id,
            "attempt": self.attempt,
            "tokens": self.num_tokens,
            "seconds": time.monotonic() - self.received_at,
        }

    def cancel_timers(self) -> None:
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()


def recorded_choices(entries: Sequence[StreamEvent], count: int) -> list[ChoiceRecord]:
    """The choices as earlier attempts left them in the stream."""
    choices = [ChoiceRecord() for _ in range(count)]
    for entry in entries:
        if isinstance(entry, ChunkEvent) and 0 <= entry.index < count:
            choice = choices[entry.index]
            choice.add(entry.token_ids, entry.text, entry.logprobs)
            choice.finish_reason, choice.stop_reason = entry.finish_reason, entry.stop_reason
    return choices


def recorded_result(request_id: str, entries: Sequence[StreamEvent], ended: EndEvent) -> GenerateResult:
    """The result of a request whose stream has ended, read back from it."""
    count = 1 + max((entry.index for entry in entries if isinstance(entry, ChunkEvent)), default=-1)
    choices = recorded_choices(entries, count)
    outputs = [choice.to_output(index) for index, choice in enumerate(choices)]
    return GenerateResult(request_id, outputs, ended.usage, ended.error, recorded_prompt_logprobs(entries))


def recorded_usage(entries: Sequence[StreamEvent]) -> Usage | None:
    """What the tokens of the stream have cost, as far as its workers said; None where it has none."""
    num_tokens = sum(len(entry.token_ids) for entry in entries if isinstance(entry, ChunkEvent))
    if not num_tokens:
        return None
    prompt_tokens = max((entry.prompt_tokens or 0 for entry in entries if isinstance(entry, StartEvent)), default=0)
    return Usage(prompt_tokens, 0, num_tokens)


def recorded_prompt_logprobs(entries: Sequence[StreamEvent]) -> PromptLogprobs | None:
    """Those that an earlier attempt has published; the engine makes them for the first token only."""
    found = (entry.prompt_logprobs for entry in entries if isinstance(entry, ChunkEvent))
    return next((logprobs for logprobs in found if logprobs is not None), None)


def _candidates(entry: Mapping[int, EngineLogprob]) -> list[Logprob]:
    return [
        Logprob(token_id, found.logprob, found.rank or 0, found.decoded_token, found.bytes)
        for token_id, found in entry.items()
    ]
