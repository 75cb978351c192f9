"""Turns the entries of a request's stream into the chunks of a chat completion."""

from collections.abc import Iterator
from typing import Any, Final

from headrace_broker import ChunkEvent, EndEvent, StartEvent, StreamEvent
from headrace_gateway.answers.choice_text import ChoiceText
from headrace_gateway.answers.envelope import Envelope, call_id
from headrace_gateway.answers.reader import AnswerStream
from headrace_gateway.answers.token_shapes import chat_logprobs, final_usage, prompt_logprobs_shape, usage_shape
from headrace_gateway.http.broker_errors import api_error_of_end
from headrace_gateway.parsers.events import CallBegins, Content, ParserEvent, Reasoning
from headrace_gateway.requests.call import ChatOptions

Chunk = dict[str, Any]


class ChatStream(AnswerStream):
    """Writes the chunks of one chat completion.

    Args:
        envelope: the envelope of one request, with a ChatOptions.
    """

    def __init__(self, envelope: Envelope) -> None:
        assert isinstance(envelope.options, ChatOptions)
        self._options: Final = envelope.options
        self._base: Final[Chunk] = envelope.chunk_head("chat.completion.chunk")
        self._choices: list[_Choice] = []
        self._prompt_tokens: int | None = None
        self._prompt_tail: str | None = None
        self._has_started = False

    def step(self, _request_id: str, event: StreamEvent) -> list[Chunk]:
        """Return the chunks that an entry adds."""
        if isinstance(event, StartEvent):
            self._start(event)
            return []
        if isinstance(event, ChunkEvent):
            chunks = [*self._begin(event), *self._chunks(event)]
            if self._options.prompt_logprobs and event.prompt_logprobs is not None:
                chunks = chunks or [self._chunk(event.index, {"content": ""}, event)]
                chunks[0]["prompt_logprobs"] = prompt_logprobs_shape(event.prompt_logprobs)
            return chunks
        return self._end(event) if isinstance(event, EndEvent) else []

    def _start(self, event: StartEvent) -> None:
        if self._has_started:
            return  # another worker resumed the request
        self._has_started = True
        self._prompt_tokens, self._prompt_tail = event.prompt_tokens, event.prompt_tail
        if event.model is not None and event.model.weights:
            self._base["system_fingerprint"] = f"fp_{event.model.weights[:16]}"

    def _begin(self, event: ChunkEvent) -> list[Chunk]:
        """Return the role chunks of all choices: SDKs expect them first and in order."""
        if self._choices:
            return []
        self._choices = [
            _Choice(index, ChoiceText(self._options, self._prompt_tail), self._base["id"], self._options)
            for index in range(self._options.n)
        ]
        role = {"role": "assistant", "content": ""}
        return [self._chunk(index, role, event) for index in range(self._options.n)]

    def _chunks(self, event: ChunkEvent) -> Iterator[Chunk]:
        choice = self._choices[event.index]
        extra = self._extra(event)
        for delta in choice.deltas(event):
            yield self._chunk(event.index, delta, event, **extra)
            extra = {}
        if extra and (event.token_ids or extra.get("logprobs")):
            # the text of these tokens is held back; their log-probabilities still belong to this entry
            yield self._chunk(event.index, {"content": ""}, event, **extra)
        if event.finish_reason is not None and event.finish_reason != "error":
            finished = self._chunk(event.index, {}, event)
            finished["choices"][0]["finish_reason"] = choice.finish_reason(event.finish_reason)
            if event.stop_reason is not None:
                finished["choices"][0]["stop_reason"] = event.stop_reason
            yield finished

    def _extra(self, event: ChunkEvent) -> Chunk:
        extra: Chunk = {}
        if self._options.logprobs is not None and event.logprobs:
            extra["logprobs"] = chat_logprobs(
                event.logprobs, top=self._options.logprobs, as_ids=self._options.tokens_as_ids
            )
        if self._options.return_token_ids and event.token_ids:
            extra["token_ids"] = event.token_ids
        return extra

    def _chunk(self, index: int, delta: Chunk, event: ChunkEvent, **extra: Any) -> Chunk:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **extra}
        chunk = {**self._base, "choices": [choice]}
        if self._options.continuous_usage:
            chunk["usage"] = usage_shape(self._prompt_tokens or 0, event.offset)
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk

    def _end(self, event: EndEvent) -> list[Chunk]:
        self.has_ended = True
        if event.error is not None:
            self.error = api_error_of_end(event.error.code, event.error.message, prompt_field="messages")
            return [self.error.body()]
        if not self._options.include_usage or event.usage is None:
            return []
        reasoning = None
        if self._options.reasoning_parser is not None:
            reasoning = sum(choice.num_reasoning_tokens for choice in self._choices)
        return [{**self._base, "choices": [], "usage": final_usage(event.usage, reasoning_tokens=reasoning)}]


class _Choice:
    """The message of one choice."""

    def __init__(self, index: int, text: ChoiceText, completion_id: str, options: ChatOptions) -> None:
        self._index = index
        self._text = text
        self._completion_id = completion_id
        self._options = options
        self._num_calls = 0

    @property
    def num_reasoning_tokens(self) -> int:
        return self._text.num_reasoning_tokens

    def deltas(self, event: ChunkEvent) -> Iterator[Chunk]:
        """Yield the deltas that the entry adds to the message."""
        for each in self._text.read(event):
            delta = self._delta(each)
            if delta is not None:
                yield delta

    def _delta(self, event: ParserEvent) -> Chunk | None:
        if isinstance(event, Content):
            return {"content": event.text}
        if isinstance(event, Reasoning):
            return {"reasoning_content": event.text} if self._options.include_reasoning else None
        if isinstance(event, CallBegins):
            self._num_calls += 1
            name = {"name": event.name, "arguments": ""}
            identity = call_id(self._completion_id, self._index, event.index)
            return {"tool_calls": [{"index": event.index, "id": identity, "type": "function", "function": name}]}
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.json}}]}

    def finish_reason(self, engine_reason: str) -> str:
        """Return OpenAI's finish reason. A named choice ends with `stop`, as the caller knows the called function."""
        if engine_reason == "length":
            return "length"
        return "tool_calls" if self._num_calls and self._options.tool_choice != "named" else "stop"
