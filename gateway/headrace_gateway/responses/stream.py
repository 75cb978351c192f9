"""Turns the entries of a request's stream into the events of the Responses API.

The order: response.created; response.queued for a background response; response.in_progress when a worker begins; the
items one after the other; and response.completed, .incomplete or .failed.
"""

from collections.abc import Iterable
from typing import Any, Final

from headrace_broker import ChunkEvent, EndEvent, StartEvent, StreamEvent, Usage
from headrace_gateway.answers.choice_text import ChoiceText
from headrace_gateway.answers.envelope import Envelope, call_id
from headrace_gateway.answers.reader import AnswerStream
from headrace_gateway.answers.token_shapes import chat_logprobs
from headrace_gateway.http.broker_errors import api_error_of_end
from headrace_gateway.parsers.events import CallArguments, CallBegins, Content, ParserEvent, Reasoning
from headrace_gateway.requests.call import ResponseOptions
from headrace_gateway.responses.output_items import CallItem, Item, MessageItem, ReasoningItem
from headrace_wire.codes import ErrorCode, GatewayCode

Chunk = dict[str, Any]
_ERROR_CODES: Final = {429: GatewayCode.RATE_LIMIT_EXCEEDED, 400: "invalid_prompt", 404: "invalid_prompt"}
"""OpenAI's code of a failed response, by the HTTP status of its error; for any other status `server_error`."""


class ResponseStream(AnswerStream):
    """Writes the events of one response.

    Args:
        envelope: the envelope of one request, with a ResponseOptions.
    """

    def __init__(self, envelope: Envelope) -> None:
        assert isinstance(envelope.options, ResponseOptions)
        self._envelope: Final = envelope
        self._options: Final = envelope.options
        self._text: ChoiceText | None = None
        self._prompt_tail: str | None = None
        self._status = "queued" if self._options.background else "in_progress"
        self._has_started = False
        self._finish_reason: str | None = None
        self._number = 0
        self._output: Final[list[Chunk]] = []
        self._open: Item | None = None
        self._waiting_logprobs: list[Chunk] = []
        """Log-probabilities of tokens whose text is held back."""
        self._usage: Chunk | None = None

    def opening(self) -> list[Chunk]:
        """Return the events that precede the first entry."""
        events = [self._snapshot("created")]
        return [*events, self._snapshot("queued")] if self._options.background else events

    def step(self, _request_id: str, event: StreamEvent) -> list[Chunk]:
        """Return the events that an entry adds."""
        if isinstance(event, StartEvent):
            return self._start(event)
        if isinstance(event, ChunkEvent):
            return self._chunk(event)
        return self._end(event) if isinstance(event, EndEvent) else []

    def state(self) -> Chunk:
        """Return the fields of the object that change while it is written. The request determines all others."""
        reason = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            "status": self._status,
            "completed_at": None,
            "error": self._failure(),
            "incomplete_details": reason,
            "output": [*self._output, *([self._open.shape()] if self._open is not None else [])],
            "usage": self._usage,
        }

    def _failure(self) -> Chunk | None:
        if self.error is None or self._status == "cancelled":
            return None
        code = _ERROR_CODES.get(self.error.status, "server_error")
        return {"code": code, "message": f"{self.error.message} ({self.error.code})"}

    def _numbered(self, events: Iterable[Chunk]) -> list[Chunk]:
        numbered = []
        for event in events:
            numbered.append({"type": event["type"], "sequence_number": self._number, **event})
            self._number += 1
        return numbered

    def _snapshot(self, kind: str) -> Chunk:
        response = response_object(self._envelope, self.state())
        (event,) = self._numbered([{"type": f"response.{kind}", "response": response}])
        return event

    def _start(self, event: StartEvent) -> list[Chunk]:
        if self._has_started:
            return []  # another worker resumed the request
        self._has_started = True
        self._prompt_tail = event.prompt_tail
        self._status = "in_progress"
        return [self._snapshot("in_progress")]

    def _chunk(self, event: ChunkEvent) -> list[Chunk]:
        if self._text is None:
            self._text = ChoiceText(self._options, self._prompt_tail)
        logprobs = self._logprobs(event)
        events: list[Chunk] = []
        read = list(self._text.read(event))
        for each in read:
            events += self._item_events(each, logprobs)
            if isinstance(each, Content):
                logprobs = []
        # the API has no field for log-probabilities of reasoning and call tokens
        may_wait = isinstance(self._open, MessageItem) or (not read and self._open is None)
        self._waiting_logprobs = logprobs if may_wait else []
        self._finish_reason = event.finish_reason or self._finish_reason
        return self._numbered(events)

    def _logprobs(self, event: ChunkEvent) -> list[Chunk]:
        waiting, self._waiting_logprobs = self._waiting_logprobs, []
        if self._options.logprobs is None or not event.logprobs:
            return waiting
        shape: list[Chunk] = chat_logprobs(
            event.logprobs, top=self._options.logprobs, as_ids=self._options.tokens_as_ids
        )["content"]
        for token in (each for position in shape for each in (position, *position["top_logprobs"])):
            if token["bytes"] is None:  # the API's type does not allow null
                token["bytes"] = list(token["token"].encode())
        return [*waiting, *shape]

    def _item_events(self, event: ParserEvent, logprobs: list[Chunk]) -> list[Chunk]:
        """Return the events that continue the open item, or that close it and open the next one."""
        place = len(self._output) + (self._open is not None)
        if isinstance(event, CallArguments):
            assert isinstance(self._open, CallItem)
            return [self._open.add(event.json)]
        if isinstance(event, CallBegins):
            identity = call_id(self._envelope.id, 0, event.index)
            return self._begin(CallItem(self._envelope.id, place, call_id=identity, name=event.name))
        if isinstance(event, Reasoning):
            events = []
            if not isinstance(self._open, ReasoningItem):
                events = self._begin(ReasoningItem(self._envelope.id, place, is_summary=self._options.has_summary))
            assert isinstance(self._open, ReasoningItem)
            return [*events, self._open.add(event.text)]
        events = []
        if not isinstance(self._open, MessageItem):
            events = self._begin(MessageItem(self._envelope.id, place))
        assert isinstance(self._open, MessageItem)
        return [*events, self._open.add(event.text, logprobs)]

    def _begin(self, item: Item) -> list[Chunk]:
        ended = self._close("completed")
        self._open = item
        return [*ended, *item.opened()]

    def _close(self, status: str) -> list[Chunk]:
        if self._open is None:
            return []
        events = []
        if self._waiting_logprobs and isinstance(self._open, MessageItem):
            events.append(self._open.add("", self._waiting_logprobs))
            self._waiting_logprobs = []
        events += self._open.closed(status)
        self._output.append(events[-1]["item"])
        self._open = None
        return events

    def _end(self, event: EndEvent) -> list[Chunk]:
        self.has_ended = True
        if event.usage is not None:
            self._usage = self._usage_shape(event.usage)
        if event.error is not None:
            return self.fail(event.error.code, event.error.message)
        if self._finish_reason == "length":
            events = self._numbered(self._close("incomplete"))
            self._status = "incomplete"
            return [*events, self._snapshot("incomplete")]
        events = [] if self._output or self._open else self._begin(MessageItem(self._envelope.id, 0))
        events = self._numbered([*events, *self._close("completed")])
        self._status = "completed"
        return [*events, self._snapshot("completed")]

    def fail(self, code: str, message: str) -> list[Chunk]:
        """End the response with an error of the queue. Return the events for it."""
        self.has_ended = True
        self.error = error = api_error_of_end(code, message, prompt_field="input")
        events = self._numbered(self._close("incomplete"))
        if code == ErrorCode.CANCELLED:
            # the SDKs have no event response.cancelled
            self._status = "cancelled"
            return [*events, self._snapshot("incomplete")]
        self._status = "failed"
        told = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return [*events, *self._numbered([told]), self._snapshot("failed")]

    def _usage_shape(self, usage: Usage) -> Chunk:
        reasoning = 0 if self._text is None else self._text.num_reasoning_tokens
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def response_object(envelope: Envelope, state: Chunk) -> Chunk:
    """Return the whole object: the fields from the request, and the state."""
    assert isinstance(envelope.options, ResponseOptions)
    head = {"id": envelope.id, "object": "response", "created_at": envelope.created, "model": envelope.model}
    expected = {} if envelope.due is None else {"expected_at": envelope.due}
    return {**head, **expected, **state, **envelope.options.config}
