"""OpenTelemetry's provider for a process that exports its own traces. Needs the extra `headrace[tracing]`.

Where they go is said by OpenTelemetry's own variables: `OTEL_EXPORTER_OTLP_ENDPOINT` (http://127.0.0.1:4318 unless
set), `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_TRACES_SAMPLER` and so on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_monitoring.errors import TracingError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


def make_tracer_provider(service_name: str, version: str, instance: str) -> TracerProvider:
    """A provider that exports in the background by OTLP over HTTP; `shutdown` sends what is left.

    Raises:
        TracingError: the extra is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracingError(str(error.name)) from error
    resource = Resource.create(
        {"service.name": service_name, "service.version": version, "service.instance.id": instance}
    )
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
