"""Turns the entries of one or more streams into the chunks of a text completion."""

from collections.abc import Iterator
from typing import Any, Final

from headrace_broker import ChunkEvent, EndEvent, StartEvent, StreamEvent, Usage
from headrace_gateway.answers.envelope import Envelope
from headrace_gateway.answers.reader import AnswerStream
from headrace_gateway.answers.token_shapes import CompletionLogprobs, final_usage, prompt_logprobs_shape, usage_shape
from headrace_gateway.http.broker_errors import api_error_of_end
from headrace_gateway.requests.call import CompletionOptions

Chunk = dict[str, Any]


class CompletionStream(AnswerStream):
    """Writes the chunks of one text completion.

    Args:
        envelope: the envelope of one request per prompt, with a CompletionOptions.
    """

    def __init__(self, envelope: Envelope) -> None:
        assert isinstance(envelope.options, CompletionOptions)
        self._options: Final = envelope.options
        self._base: Final[Chunk] = envelope.chunk_head("text_completion")
        self._prompts: Final = {
            request_id: _Prompt(position, self._options) for position, request_id in enumerate(envelope.request_ids)
        }
        self._usages: list[Usage] = []

    def step(self, request_id: str, event: StreamEvent) -> list[Chunk]:
        """Return the chunks that an entry adds."""
        prompt = self._prompts[request_id]
        if isinstance(event, StartEvent):
            if event.prompt_tokens is not None:
                prompt.num_tokens = event.prompt_tokens
            if event.model is not None and event.model.weights:
                self._base.setdefault("system_fingerprint", f"fp_{event.model.weights[:16]}")
            return []
        if isinstance(event, EndEvent):
            return self._end(event)
        if not isinstance(event, ChunkEvent):
            return []
        prompt.num_generated = event.offset
        return [self._chunk(part) for part in prompt.parts(event)]

    def _chunk(self, choice: Chunk) -> Chunk:
        chunk = {**self._base, "choices": [choice]}
        if self._options.continuous_usage:
            prompts = self._prompts.values()
            generated = 0 if self._options.drop_generated else sum(prompt.num_generated for prompt in prompts)
            chunk["usage"] = usage_shape(sum(prompt.num_tokens for prompt in prompts), generated)
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk

    def _end(self, event: EndEvent) -> list[Chunk]:
        if event.error is not None:
            self.has_ended = True
            self.error = api_error_of_end(event.error.code, event.error.message, prompt_field="prompt")
            return [self.error.body()]
        self._usages.append(event.usage or Usage(0, 0, 0))
        if len(self._usages) < len(self._prompts):
            return []
        self.has_ended = True
        if not self._options.include_usage:
            return []
        prompt_tokens = sum(usage.prompt_tokens for usage in self._usages)
        cached_tokens = sum(usage.cached_tokens for usage in self._usages)
        generated = 0 if self._options.drop_generated else sum(usage.completion_tokens for usage in self._usages)
        return [{**self._base, "choices": [], "usage": final_usage(Usage(prompt_tokens, cached_tokens, generated))}]


class _Prompt:
    """The choices of one prompt."""

    def __init__(self, position: int, options: CompletionOptions) -> None:
        self._first_index = position * options.n
        self._options = options
        self._echo = options.prompts[position] if options.echo else None
        self._logprobs = [
            CompletionLogprobs(top=options.logprobs or 0, as_ids=options.tokens_as_ids) for _ in range(options.n)
        ]
        self._has_begun = False
        self._early: list[ChunkEvent] = []
        """Chunks that arrived before the prompt's log-probabilities, which arrive with choice 0."""
        self.num_tokens = 0
        self.num_generated = 0

    def parts(self, event: ChunkEvent) -> Iterator[Chunk]:
        """Yield the parts that the entry adds to the choices."""
        if not self._has_begun:
            shows_scores = self._options.logprobs is not None or self._options.prompt_logprobs
            needs_prompt = self._options.echo and (shows_scores or self._echo is None)
            if needs_prompt and event.prompt_logprobs is None:
                self._early.append(event)
                return
            self._has_begun = True
            yield from self._prompt_parts(event)
            for early in self._early:
                yield from self._generated(early)
        elif event.prompt_logprobs is not None and self._options.prompt_logprobs and not self._options.echo:
            yield from self._prompt_parts(event)  # another choice arrived first
        yield from self._generated(event)

    def _prompt_parts(self, event: ChunkEvent) -> Iterator[Chunk]:
        tokens = event.prompt_logprobs
        shown = prompt_logprobs_shape(tokens) if tokens is not None and self._options.prompt_logprobs else None
        if not self._options.echo:
            if shown is not None:
                yield self._part(0, "", prompt_logprobs=shown)
            return
        rest = "".join(each[0].decoded_text or "" for each in tokens or () if each is not None)
        text = rest if self._echo is None else self._echo
        first_text = text[: len(text) - len(rest)] if text.endswith(rest) else ""
        for index in range(self._options.n):
            extra: Chunk = {}
            if self._options.logprobs is not None and tokens is not None:
                extra["logprobs"] = self._logprobs[index].add(tokens, first_text=first_text)
            if shown is not None and index == 0:
                extra["prompt_logprobs"] = shown
            yield self._part(index, text, **extra)

    def _generated(self, event: ChunkEvent) -> Iterator[Chunk]:
        if not self._options.drop_generated:
            extra: Chunk = {}
            if self._options.logprobs is not None and event.logprobs:
                extra["logprobs"] = self._logprobs[event.index].add(event.logprobs)
            if self._options.return_token_ids and event.token_ids:
                extra["token_ids"] = event.token_ids
            if event.text or extra:
                yield self._part(event.index, event.text, **extra)
        if event.finish_reason is not None and event.finish_reason != "error":
            finished = self._part(event.index, "")
            is_length = event.finish_reason == "length" or self._options.drop_generated
            finished["finish_reason"] = "length" if is_length else "stop"
            if event.stop_reason is not None:
                finished["stop_reason"] = event.stop_reason
            yield finished

    def _part(self, index: int, text: str, **extra: Any) -> Chunk:
        return {"index": self._first_index + index, "text": text, "logprobs": None, "finish_reason": None, **extra}
