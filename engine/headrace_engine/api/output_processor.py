"""Converts the token ids of the core to outputs: text, stop strings and log-probabilities.

It runs in parallel with the step loop: while it converts step N to text, the core computes step N + 1.
"""

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from headrace_engine.api.input_processor import ProcessedRequest
from headrace_engine.core.outputs import EngineCoreOutput, StepStats
from headrace_engine.errors import DuplicateRequestError
from headrace_engine.requests.lora_request import LoRARequest
from headrace_engine.requests.outputs import CompletionOutput, Logprob, RequestOutput, RequestStateStats
from headrace_engine.requests.request import FinishReason
from headrace_engine.requests.sampling_params import RequestOutputKind, SamplingParams
from headrace_engine.runner.contracts import TokenLogprobs
from headrace_engine.text.detokenizer import Detokenizer, create_detokenizer
from headrace_engine.text.logprob_texts import LogprobTexts
from headrace_engine.text.tokenizer import ModelTokenizer


@dataclass(slots=True)
class _Choice:
    """The state of one choice. It keeps what the next output shows: not the deltas that the reader has already."""

    index: int
    detokenizer: Detokenizer
    token_ids: list[int]
    """With deltas, the tokens that no output has shown yet, otherwise all tokens. `logprobs` has an entry for each."""
    is_begun: bool
    """Whether tokens were shown, perhaps by an earlier attempt."""
    logprob_texts: LogprobTexts | None = None
    """Set if the request asks for log-probabilities and for text."""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_unshown_tokens: int = 0
    """New tokens since the last output, because of stream_interval or while outputs are held back."""
    unshown_text: str = ""

    @property
    def is_at_an_end(self) -> bool:
        """Whether the new tokens are the first or the last ones of the choice."""
        return self.finish_reason is not None or not self.is_begun

    def is_due(self, params: SamplingParams) -> bool:
        """Whether to show the new tokens now: the first and the last at once, the others in groups."""
        if params.output_kind is RequestOutputKind.FINAL_ONLY:
            return self.finish_reason is not None
        interval = params.stream_interval
        return interval is None or self.is_at_an_end or self.num_unshown_tokens >= interval


@dataclass(slots=True)
class _RequestState:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    choices: list[_Choice]
    choice_ids: list[str]
    """The ids of the choices in the core, by index."""
    stats: RequestStateStats
    lora_request: LoRARequest | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def finished(self) -> bool:
        return None not in [choice.finish_reason for choice in self.choices]  # takes a third of the time of a generator


@dataclass(slots=True)
class ProcessedOutputs:
    request_outputs: list[RequestOutput]
    """At most one output for each request."""
    finished_choice_ids: list[str]
    """The choices that ended at a stop string. The caller must abort them in the core."""


class OutputProcessor:
    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, _RequestState] = {}
        self._choices: dict[str, tuple[_RequestState, _Choice]] = {}
        self._held_back: dict[str, tuple[_RequestState, _Choice]] = {}
        """Choices whose output became due while outputs were held back, in order."""

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add_request(self, request: ProcessedRequest, ended: Collection[int] = ()) -> None:
        """Start to process a request. Resumed choices continue after their `output_token_ids`.

        Args:
            ended: indices of the choices that an earlier attempt has ended. They get no outputs.
        """
        if request.request_id in self._requests:
            raise DuplicateRequestError(f"request {request.request_id} is in the engine already")
        pieces = self._tokenizer.pieces
        core_requests = {index: choice for index, choice in enumerate(request.choices) if index not in ended}
        is_delta = request.params.output_kind is RequestOutputKind.DELTA
        choices = [
            _Choice(
                index,
                create_detokenizer(pieces, request.prompt_token_ids, request.params),
                token_ids=[] if is_delta else list(core_request.output_token_ids),
                is_begun=bool(core_request.output_token_ids),
            )
            for index, core_request in core_requests.items()
        ]
        state = _RequestState(
            request.request_id,
            request.prompt,
            request.prompt_token_ids,
            request.params,
            choices=choices,
            choice_ids=[core_request.request_id for core_request in core_requests.values()],
            stats=RequestStateStats(arrival_time=time.time(), queued_ts=time.monotonic()),
            lora_request=request.choices[0].lora_request,
        )
        for choice, core_request in zip(choices, core_requests.values(), strict=True):
            choice.detokenizer.update(core_request.output_token_ids, finished=False)
            if request.params.wants_logprobs and request.params.detokenize:
                choice.logprob_texts = LogprobTexts(pieces, request.prompt_token_ids, core_request.output_token_ids)
            self._choices[core_request.request_id] = (state, choice)
        self._requests[request.request_id] = state

    @property
    def holds_back(self) -> bool:
        """Whether an output is held back until a later call of `process`."""
        return bool(self._held_back)

    def process(
        self, outputs: Iterable[EngineCoreOutput], *, hold_back: bool = False, stats: StepStats | None = None
    ) -> ProcessedOutputs:
        """Convert the outputs of one step. Unknown choices are ignored.

        Args:
            hold_back: show only the first and the last tokens of a choice. The next call without it shows the tokens
                held back, even if that call has no outputs of the choice.
            stats: the statistics of the step.
        """
        now = time.monotonic()
        if stats is not None:
            self._note_begun(stats, now)
        touched: dict[str, tuple[_RequestState, list[CompletionOutput]]] = {}
        stopped: list[str] = []
        for output in outputs:
            followed = self._choices.get(output.request_id)
            if followed is None or followed[1].finish_reason is not None:
                continue
            state, choice = followed
            num_before = choice.num_unshown_tokens
            self._update(state, choice, output)
            if choice.num_unshown_tokens > num_before:
                _note_tokens(state.stats, choice.num_unshown_tokens - num_before, now)
            if choice.finish_reason is not None and output.finish_reason is None:
                stopped.append(output.request_id)
            if not choice.is_due(state.params):
                continue
            if hold_back and not choice.is_at_an_end:
                self._held_back[output.request_id] = followed
            else:
                if self._held_back:
                    self._held_back.pop(output.request_id, None)
                touched.setdefault(state.request_id, (state, []))[1].append(_completion(state, choice))
        if self._held_back and not hold_back:
            for state, choice in self._held_back.values():
                touched.setdefault(state.request_id, (state, []))[1].append(_completion(state, choice))
            self._held_back.clear()
        results = []
        for state, completions in touched.values():
            finished = state.finished
            if state.params.output_kind is not RequestOutputKind.FINAL_ONLY:
                results.append(_request_output(state, completions, finished))
            elif finished:
                completions = [_completion(state, choice) for choice in state.choices]
                results.append(_request_output(state, completions, finished))
            if finished:
                self._forget(state)
        return ProcessedOutputs(results, stopped)

    def _note_begun(self, stats: StepStats, now: float) -> None:
        for choice_id in stats.admitted_choice_ids:
            followed = self._choices.get(choice_id)
            if followed is not None and not followed[0].stats.scheduled_ts:
                followed[0].stats.scheduled_ts = now - stats.step_seconds

    def abort(self, request_id: str) -> tuple[RequestOutput, list[str]] | None:
        """Remove a request. Return its last output, and the ids of the choices to abort in the core."""
        state = self._requests.get(request_id)
        if state is None:
            return None
        alive, completions = [], []
        for choice_id, choice in zip(state.choice_ids, state.choices, strict=True):
            if choice.finish_reason is None:
                choice.unshown_text += choice.detokenizer.update([], finished=True)[0]
                choice.finish_reason = FinishReason.ABORT.value
                alive.append(choice_id)
                completions.append(_completion(state, choice))
        self._forget(state)
        return _request_output(state, completions, finished=True), alive

    def _update(self, state: _RequestState, choice: _Choice, output: EngineCoreOutput) -> None:
        """Convert tokens to text, which may end the choice."""
        visible = output.new_token_ids
        if output.finish_reason is FinishReason.STOP and not state.params.include_stop_str_in_output:
            visible = visible[:-1]  # like a stop string, the stop or end token is not shown
        num_before = choice.detokenizer.num_tokens
        text, stop = choice.detokenizer.update(visible, finished=output.finish_reason is not None)
        # A step may yield several tokens. Those after a stop string are dropped.
        num_taken = None if stop is None else choice.detokenizer.num_tokens - num_before
        token_ids = output.new_token_ids[:num_taken]
        choice.token_ids += token_ids
        choice.num_unshown_tokens += len(token_ids)
        choice.unshown_text += text
        if output.logprobs is not None:
            taken = output.logprobs[:num_taken]
            choice.logprobs += _read_logprobs(choice.logprob_texts, taken)
            choice.cumulative_logprob += sum(entry[0][1] for entry in taken)  # the first entry is the sampled token
        if output.prompt_logprobs is not None:
            texts = None
            if state.params.detokenize:
                texts = LogprobTexts(self._tokenizer.pieces, output_token_ids=state.prompt_token_ids[:1])
            state.prompt_logprobs = [None, *_read_logprobs(texts, output.prompt_logprobs)]
        if output.num_cached_tokens > state.num_cached_tokens:
            state.num_cached_tokens = output.num_cached_tokens
        state.error = state.error or output.error
        if stop is not None:
            choice.finish_reason, choice.stop_reason = FinishReason.STOP.value, stop
        elif output.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = output.finish_reason.value, output.stop_reason

    def _forget(self, state: _RequestState) -> None:
        del self._requests[state.request_id]
        for choice_id in state.choice_ids:
            del self._choices[choice_id]
            self._held_back.pop(choice_id, None)


def _read_logprobs(texts: LogprobTexts | None, entries: Iterable[TokenLogprobs]) -> list[dict[int, Logprob]]:
    if texts is not None:
        return [texts.read(entry) for entry in entries]
    return [
        {token_id: Logprob(logprob=value, rank=rank, decoded_token=None) for token_id, value, rank in entry}
        for entry in entries
    ]


def _request_output(state: _RequestState, completions: list[CompletionOutput], finished: bool) -> RequestOutput:
    prompt_logprobs = state.prompt_logprobs
    if state.params.output_kind is RequestOutputKind.DELTA:
        state.prompt_logprobs = None  # shown only once
    return RequestOutput(
        state.request_id,
        state.prompt,
        state.prompt_token_ids,
        prompt_logprobs,
        completions,
        finished,
        state.stats,
        state.lora_request,
        state.num_cached_tokens,
        state.error,
    )


def _completion(state: _RequestState, choice: _Choice) -> CompletionOutput:
    """Return the output of a choice: only the new part for deltas, otherwise all of it."""
    token_ids, text, logprobs = choice.token_ids, choice.unshown_text, choice.logprobs
    if state.params.output_kind is RequestOutputKind.DELTA:
        choice.token_ids, choice.logprobs = [], []
    else:
        token_ids, text, logprobs = list(token_ids), choice.detokenizer.text, list(logprobs)
    choice.num_unshown_tokens, choice.unshown_text, choice.is_begun = 0, "", True
    wants_logprobs = state.params.wants_logprobs
    return CompletionOutput(
        choice.index,
        text,
        token_ids,
        choice.cumulative_logprob if wants_logprobs else None,
        logprobs if wants_logprobs else None,
        choice.finish_reason,
        choice.stop_reason,
        state.lora_request,
    )


def _note_tokens(stats: RequestStateStats, count: int, now: float) -> None:
    stats.num_generation_tokens += count
    stats.last_token_ts = now
    if not stats.first_token_ts:
        stats.first_token_ts = now
        stats.first_token_latency = now - stats.queued_ts
