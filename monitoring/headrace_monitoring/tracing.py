"""The OpenTelemetry tracer provider of a process that exports its own traces. Needs the extra `headrace[tracing]`.

OpenTelemetry's environment variables configure the export: `OTEL_EXPORTER_OTLP_ENDPOINT` (default:
http://127.0.0.1:4318), `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_TRACES_SAMPLER` and others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_monitoring.errors import TracingError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


def make_tracer_provider(service_name: str, version: str, instance: str) -> TracerProvider:
    """Return a provider that exports spans in the background by OTLP over HTTP. Its `shutdown` sends pending spans.

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
