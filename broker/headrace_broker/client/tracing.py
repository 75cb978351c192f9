"""The clients' spans, and the propagation of trace context: W3C's `traceparent` and `tracestate` in the message's
headers, and `traceparent` in the stream's start entry.

Tracing needs the extra `headrace[tracing]` and an application that has set up a tracer provider. Otherwise nothing is
recorded or sent. Names are those of OpenTelemetry's semantic conventions for messaging and generative AI. Spans contain
no prompt and no text.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from headrace_broker.keys import queue_name
from headrace_broker.streams.events import ChunkEvent, EndEvent, StartEvent, StreamEvent

try:
    from opentelemetry import trace
    from opentelemetry.trace import SpanKind, Status, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    _INSTALLED = False
else:
    _INSTALLED = True

if TYPE_CHECKING:
    from headrace_broker.client.submission import Submission

INSTRUMENTATION: Final = "headrace"
CONTEXT_HEADERS: Final = ("traceparent", "tracestate")

_PARAMS: Final = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "n": "gen_ai.request.choice.count",
    "seed": "gen_ai.request.seed",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}


def context_of(headers: Mapping[str, Any]) -> Any:
    """Return the context in a message's headers or a start entry, as a span's parent; an empty one if it has none."""
    carrier = {name: headers[name] for name in CONTEXT_HEADERS if isinstance(headers.get(name), str)}
    return TraceContextTextMapPropagator().extract(carrier)


def headers_of(span: Any) -> dict[str, str]:
    """Return the headers that make a span the parent of the receiver's spans; empty if the span is not recorded."""
    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers, trace.set_span_in_context(span))
    return headers


def request_attributes(model: str, request_id: str, params: Mapping[str, Any] | None, *, chat: bool) -> dict[str, Any]:
    """Return the conventions' attributes of a request. They contain no prompt."""
    given = params or {}
    return {
        "gen_ai.operation.name": "chat" if chat else "text_completion",
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.model": model,
        "gen_ai.response.id": request_id,
        "messaging.message.id": request_id,
        **{attribute: given[name] for name, attribute in _PARAMS.items() if isinstance(given.get(name), int | float)},
    }


class ClientTracing:
    """A client's spans: `send` for a submission, `receive` for a stream that it reads.

    `provider` is an opentelemetry.trace.TracerProvider; the default is the global one.
    """

    def __init__(self, provider: Any = None) -> None:
        self._tracer: Final[Any] = trace.get_tracer(INSTRUMENTATION, tracer_provider=provider) if _INSTALLED else None

    @contextmanager
    def sending(self, submission: "Submission") -> Iterator[Mapping[str, str]]:
        """Record a span while the request is sent. Yields the headers that carry its context."""
        if self._tracer is None:
            yield {}
            return
        queue = queue_name(submission.model)
        wire = submission.request.to_kwargs()
        attributes = {
            "messaging.system": "redis",
            "messaging.operation.type": "send",
            "messaging.destination.name": queue,
            **request_attributes(
                submission.model, submission.request_id, wire.get("sampling_params"), chat="messages" in wire
            ),
        }
        with self._tracer.start_as_current_span(f"send {queue}", kind=SpanKind.PRODUCER, attributes=attributes) as span:
            yield headers_of(span)

    def receiving(self, request_id: str) -> "ReceiveSpan":
        """Return the span of one stream that the client reads."""
        return ReceiveSpan(self._tracer, request_id)


class ReceiveSpan:
    """The span of one stream. The start entry, which has the worker's context, starts it; the end entry ends it."""

    def __init__(self, tracer: Any, request_id: str) -> None:
        self._tracer: Final = tracer
        self._request_id: Final = request_id
        self._span: Any = None
        self._chunks = 0

    def record(self, event: StreamEvent) -> None:
        """Record an entry that has arrived."""
        if isinstance(event, StartEvent):
            self.close()  # another attempt begins
            if self._tracer is not None and event.traceparent is not None:
                self._chunks = 0
                self._span = self._tracer.start_span(
                    "receive stream",
                    context=context_of({"traceparent": event.traceparent}),
                    kind=SpanKind.CONSUMER,
                    attributes={
                        "messaging.system": "redis",
                        "messaging.operation.type": "receive",
                        "messaging.message.id": self._request_id,
                        "headrace.attempt": event.attempt,
                    },
                )
        elif self._span is None:
            return
        elif isinstance(event, ChunkEvent):
            if not self._chunks:
                self._span.add_event("first chunk")
            self._chunks += 1
        elif isinstance(event, EndEvent):
            self._span.set_attribute("gen_ai.response.finish_reasons", [event.finish_reason])
            if event.error is not None:
                self._span.set_attribute("error.type", event.error.code)
                self._span.set_status(Status(StatusCode.ERROR))
            self.close()

    def close(self) -> None:
        """End the span: the stream has ended, or the client stops reading it."""
        if self._span is not None:
            self._span.set_attribute("headrace.stream.chunks", self._chunks)
            self._span.end()
            self._span = None
