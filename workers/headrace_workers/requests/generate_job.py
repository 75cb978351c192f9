"""`GenerateJob`: a message whose prompt is continued by tokens of one or more choices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace_broker.results import (
    ChoiceOutput,
    ErrorInfo,
    GenerateResult,
    PromptLogprobs,
    TokenLogprob,
    TokenLogprobs,
    Usage,
)
from headrace_broker.streams.events import ChunkEvent, EndEvent, StreamEvent
from headrace_broker.streams.writer import StreamWrite
from headrace_engine.api.input_processor import ProcessedRequest
from headrace_engine.requests.outputs import CompletionOutput, Logprob, RequestOutput
from headrace_engine.requests.request import EngineCoreRequest
from headrace_monitoring.metrics import Publication
from headrace_wire.codes import FinishReason
from headrace_workers.requests.job import Job


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


@dataclass(slots=True, eq=False, kw_only=True)
class GenerateJob(Job):
    """A message whose prompt is continued by tokens."""

    request: ProcessedRequest
    choices: list[ChoiceRecord]
    num_first_tokens: int = 0
    """Number of tokens at `first_token_at`, including those of earlier attempts."""
    num_cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    """Published with choice 0's first token, by this attempt or an earlier one."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        return sum([len(choice.token_ids) for choice in self.choices])  # called for each chunk: faster than a generator

    @property
    def num_done(self) -> int:
        return self.num_tokens

    @property
    def num_choices(self) -> int:
        return len(self.choices)

    @property
    def num_unfinished(self) -> int:
        return [choice.finish_reason for choice in self.choices].count(None)

    @property
    def num_tokens_left(self) -> int:
        return 0

    @property
    def num_tokens_held(self) -> int:
        return self.usage().prompt_tokens + self.num_tokens

    @property
    def num_decoded_tokens(self) -> int:
        return self.num_tokens - self.num_first_tokens

    @property
    def depends_on_draws(self) -> bool:
        return not self.request.params.is_greedy

    @property
    def finish_reason(self) -> FinishReason:
        return "length" if self.choices[0].finish_reason == "length" else "stop"

    def core_requests(self) -> list[EngineCoreRequest]:
        """Make the requests for the engine that continue each unfinished choice at its next token."""
        todo = []
        for choice, core_request in zip(self.choices, self.request.choices, strict=True):
            if choice.finish_reason is None:
                core_request.output_token_ids = list(choice.token_ids)
                todo.append(core_request)
        return todo

    def publish(self, output: RequestOutput, now: float, publication: Publication) -> list[StreamWrite]:
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        writes = []
        for completion in output.outputs:
            choice = self.choices[completion.index]
            if not completion.token_ids:  # the engine refused it: there is nothing to publish except the end
                choice.finish_reason = completion.finish_reason
                continue
            writes.append(self.take(completion, output))
            num_tokens = len(completion.token_ids)
            publication.num_tokens += num_tokens
            if self.first_token_at is None:
                self.first_token_at = now
                self.num_first_tokens = self.num_tokens
                if self.num_tokens == num_tokens:  # else an earlier attempt has published the first token
                    publication.num_prompt_tokens += self.usage().prompt_tokens
            if choice.last_token_at is not None:
                publication.followed[num_tokens, now - choice.last_token_at, self.trace_id] += 1
            choice.last_token_at = now
        self.last_token_at = now
        return writes

    def publish_unshown(self, output: RequestOutput, publication: Publication) -> list[StreamWrite]:
        writes = []
        for completion in output.outputs:
            if completion.token_ids:
                completion.finish_reason = None  # the end of the stream says why
                writes.append(self.take(completion, output))
                publication.num_tokens += len(completion.token_ids)
        return writes

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
            choice_tokens=len(choice.token_ids) if len(self.choices) > 1 else None,
        )

    def end(self, finish_reason: str, error: ErrorInfo | None = None) -> StreamWrite:
        return StreamWrite.end(*self.key, self.num_tokens, finish_reason=finish_reason, usage=self.usage(), error=error)

    def usage(self) -> Usage:
        return Usage(len(self.request.prompt_token_ids), self.num_cached_tokens, self.num_tokens)

    def result(self, error: ErrorInfo | None = None) -> GenerateResult:
        outputs = [choice.to_output(index) for index, choice in enumerate(self.choices)]
        return GenerateResult(self.request_id, outputs, self.usage(), error, self.prompt_logprobs)


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


def recorded_prompt_logprobs(entries: Sequence[StreamEvent]) -> PromptLogprobs | None:
    """Read the prompt logprobs of an earlier attempt. The engine computes them with the first token only."""
    found = (entry.prompt_logprobs for entry in entries if isinstance(entry, ChunkEvent))
    return next((logprobs for logprobs in found if logprobs is not None), None)


def _candidates(entry: Mapping[int, Logprob]) -> list[TokenLogprob]:
    return [
        TokenLogprob(token_id, found.logprob, found.rank or 0, found.decoded_token, found.bytes)
        for token_id, found in entry.items()
    ]
