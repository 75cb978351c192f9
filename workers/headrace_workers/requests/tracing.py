"""`RequestTracing`: records a worker's span of each request, with one child span for each stage.

    send headrace.m (the producer)
      text_completion m (this worker)
        queue wait | engine queue | prefill | decode | publish
        receive stream (the subscriber)

The stages are recorded after the request has ended, from times that the job stores in any case. So while it runs, a
traced request costs only its span. Off unless `--tracing` is given.
"""

import time
from typing import Any

from headrace_broker.client.tracing import INSTRUMENTATION, context_of, headers_of, request_attributes
from headrace_wire.codes import FinishReason
from headrace_workers.preparation.intake import Incoming
from headrace_workers.preparation.plain_requests import AnyPrepared
from headrace_workers.requests.job import Job


class RequestTracing:
    """Starts and ends the spans of requests. Without a provider it does nothing.

    Args:
        provider: an opentelemetry.trace.TracerProvider, or None.
        model: the served name.
    """

    def __init__(self, provider: Any, model: str) -> None:
        self._tracer = None if provider is None else provider.get_tracer(INSTRUMENTATION)
        self._model = model

    def begin(self, incoming: Incoming, prepared: AnyPrepared) -> Any:
        """Start the span of a request that is about to run. Returns None if tracing is off."""
        if self._tracer is None:
            return None
        from opentelemetry.trace import SpanKind

        attributes = {
            "messaging.system": "redis",
            "messaging.operation.type": "process",
            **request_attributes(self._model, incoming.request_id, prepared.given_numbers, chat=prepared.is_chat),
        }
        if incoming.tenant is not None:
            attributes["headrace.tenant"] = incoming.tenant
        return self._tracer.start_span(
            f"{attributes['gen_ai.operation.name']} {self._model}",
            context=context_of(incoming.trace_headers),
            kind=SpanKind.CONSUMER,
            attributes=attributes,
        )

    def traceparent(self, span: Any) -> str | None:
        """Get the traceparent that the stream's start entry gives to subscribers."""
        return None if span is None else headers_of(span).get("traceparent")

    def trace_id(self, span: Any) -> str | None:
        """Get the id of a request's trace; None if the trace is not recorded."""
        return None if span is None else _recorded(span.get_span_context())

    def sender_trace_id(self, incoming: Incoming) -> str | None:
        """Get the id of the producer's trace, before the request has a span here; None if it is not recorded."""
        if self._tracer is None or not incoming.trace_headers:
            return None
        from opentelemetry.trace import get_current_span

        return _recorded(get_current_span(context_of(incoming.trace_headers)).get_span_context())

    def end(self, job: Job, outcome: FinishReason | None, error_code: str | None = None) -> None:
        """End a request's span. `outcome` is None if another worker continues the request."""
        span, job.span = job.span, None
        if span is None:
            return
        from opentelemetry.trace import Status, StatusCode

        now, usage = time.monotonic(), job.usage()
        self._record_stages(span, job, now)
        span.set_attributes(
            {
                "gen_ai.response.model": self._model,
                "gen_ai.response.finish_reasons": [outcome or "requeued"],
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "headrace.attempt": job.attempt,
            }
        )
        if job.first_token_at is not None:
            span.set_attribute("gen_ai.response.time_to_first_chunk", job.first_token_at - job.received_at)
        if error_code is not None:
            span.set_attribute("error.type", error_code)
            span.set_status(Status(StatusCode.ERROR))
        span.end()

    def _record_stages(self, parent: Any, job: Job, now: float) -> None:
        from opentelemetry.trace import set_span_in_context

        assert self._tracer is not None
        offset = time.time() - now  # from this process's monotonic clock to unix time
        context = set_span_in_context(parent)
        queued_at = None if job.queued_at is None else min(job.queued_at, job.received_at)
        for name, begin, end in (
            ("queue wait", queued_at, job.received_at),
            ("engine queue", job.received_at, job.admitted_at),
            ("prefill", job.admitted_at, job.first_token_at),
            ("decode", job.first_token_at, job.last_token_at),
            ("publish", job.last_token_at, now),
        ):
            if begin is not None and end is not None:
                stage = self._tracer.start_span(name, context=context, start_time=_nanoseconds(begin + offset))
                stage.end(_nanoseconds(max(begin, end) + offset))


def _recorded(context: Any) -> str | None:
    return f"{context.trace_id:032x}" if context.is_valid and context.trace_flags.sampled else None


def _nanoseconds(unix_seconds: float) -> int:
    return int(unix_seconds * 1e9)
