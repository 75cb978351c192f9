"""Turns the entries of a request's stream into the events of Anthropic's Messages API.

message_start (content_block_start content_block_delta* content_block_stop)* message_delta message_stop
"""

from collections.abc import Iterator
from typing import Any, Final

from headrace_broker import ChunkEvent, EndEvent, StartEvent, StreamEvent
from headrace_gateway.answers.choice_text import ChoiceText
from headrace_gateway.answers.envelope import Envelope, call_id
from headrace_gateway.answers.reader import AnswerStream
from headrace_gateway.http.broker_errors import api_error_of_end
from headrace_gateway.http.json import anthropic_error
from headrace_gateway.parsers.events import CallArguments, CallBegins, Content, ParserEvent, Reasoning
from headrace_gateway.requests.call import MessageOptions

Event = dict[str, Any]
_CALLER: Final = {"type": "direct"}
"""The model calls the tool directly, not from a program that it wrote."""


class MessageStream(AnswerStream):
    """Writes the events of one message.

    Args:
        envelope: the envelope of one request, with a MessageOptions.
    """

    def __init__(self, envelope: Envelope) -> None:
        assert isinstance(envelope.options, MessageOptions)
        self._options: Final = envelope.options
        self._envelope: Final = envelope
        self._text: ChoiceText | None = None
        self._start: StartEvent | None = None
        self._index = -1
        """Index of the last block that was opened."""
        self._open: str | None = None
        """Type of that block while it is open."""
        self._has_calls = False
        self._num_tokens = 0
        self._stop: tuple[str, str | None] = ("end_turn", None)

    def step(self, _request_id: str, event: StreamEvent) -> list[Event]:
        """Return the events that an entry adds."""
        if isinstance(event, StartEvent):
            self._start = self._start or event  # a second start: another worker resumed the request
            return []
        if isinstance(event, ChunkEvent):
            return [*self._begin(), *self._blocks(event)]
        return self._end(event) if isinstance(event, EndEvent) else []

    def _begin(self) -> Iterator[Event]:
        if self._text is not None:
            return
        self._text = ChoiceText(self._options, self._start.prompt_tail if self._start is not None else None)
        prompt_tokens = self._start.prompt_tokens if self._start is not None else None
        yield {
            "type": "message_start",
            "message": {
                "id": self._envelope.id,
                "type": "message",
                "role": "assistant",
                "model": self._envelope.model,
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "stop_details": None,
                "container": None,
                "usage": {
                    **_usage(prompt_tokens or 0, 0, 0),
                    "cache_creation": None,
                    "inference_geo": None,
                    "service_tier": "standard",
                },
            },
        }

    def _blocks(self, event: ChunkEvent) -> Iterator[Event]:
        assert self._text is not None
        self._num_tokens = event.offset
        for each in self._text.read(event):
            yield from self._block_events(each)
        if event.finish_reason is not None and event.finish_reason != "error":
            yield from self._close()
            self._stop = self._stopped(event)

    def _block_events(self, event: ParserEvent) -> Iterator[Event]:
        if isinstance(event, Content):
            yield from self._open_block("text", text="")
            yield self._delta("text_delta", text=event.text)
        elif isinstance(event, Reasoning):
            if self._options.shows_thinking:
                yield from self._open_block("thinking", thinking="", signature="")
                yield self._delta("thinking_delta", thinking=event.text)
        elif isinstance(event, CallBegins):
            self._has_calls = True
            yield from self._close()
            identity = call_id(self._envelope.id, 0, event.index).replace("call_", "toolu_")
            yield from self._open_block("tool_use", id=identity, name=event.name, input={}, caller=_CALLER)
        else:
            assert isinstance(event, CallArguments)
            yield self._delta("input_json_delta", partial_json=event.json)

    def _open_block(self, kind: str, **fields: Any) -> Iterator[Event]:
        if self._open == kind:
            return
        yield from self._close()
        self._index += 1
        self._open = kind
        yield {"type": "content_block_start", "index": self._index, "content_block": {"type": kind, **fields}}

    def _delta(self, kind: str, **fields: str) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, **fields}}

    def _close(self) -> Iterator[Event]:
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._index}

    def _stopped(self, event: ChunkEvent) -> tuple[str, str | None]:
        """Return `stop_reason` and `stop_sequence`."""
        if event.finish_reason == "length":
            is_asked = event.offset >= self._options.max_tokens
            return ("max_tokens" if is_asked else "model_context_window_exceeded"), None
        if self._has_calls:
            return "tool_use", None
        if event.stop_reason in self._options.stop_sequences:
            return "stop_sequence", str(event.stop_reason)
        return "end_turn", None

    def _end(self, event: EndEvent) -> list[Event]:
        self.has_ended = True
        if event.error is not None:
            self.error = api_error_of_end(event.error.code, event.error.message, prompt_field="messages")
            return [anthropic_error(self.error)[0]]
        usage = event.usage
        prompt_tokens = (self._start.prompt_tokens if self._start is not None else None) or 0
        told = _usage(prompt_tokens, 0, self._num_tokens)
        if usage is not None:
            told = _usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        if self._text is not None and self._options.reasoning_parser is not None:
            told["output_tokens_details"] = {"thinking_tokens": self._text.num_reasoning_tokens}
        reason, sequence = self._stop
        return [
            *self._begin(),
            *self._close(),
            {
                "type": "message_delta",
                "delta": {
                    "stop_reason": reason,
                    "stop_sequence": sequence,
                    "stop_details": None,
                    "container": None,
                },
                "usage": told,
            },
            {"type": "message_stop"},
        ]


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> Event:
    """Return the usage; `input_tokens` excludes cached tokens."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
        "output_tokens_details": None,
        "server_tool_use": None,
    }
