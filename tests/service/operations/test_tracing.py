"""One trace from the producer through a real worker to the subscriber, collected by OTLP and in memory."""

import gzip
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from headrace_broker.client.client import Client
from headrace_broker.keys import queue_name
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.streams.writer import StreamWrite, StreamWriter
from headrace_monitoring import dashboards
from service.operations.prometheus import Prometheus, prometheus_or_skip, with_variables
from service.workers.conftest import make_service, model_folder
from service.workers.service import Service

__all__ = ["make_service", "model_folder"]

STAGES = ["queue wait", "engine queue", "prefill", "decode", "publish"]


class Collector:
    """An OTLP collector on loopback."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        spans.extend(scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture
def memory() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(memory: InMemorySpanExporter) -> TracerProvider:
    made = TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(memory))
    return made


def attributes(span: Any) -> dict[str, Any]:
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in span.attributes}


def test_a_request_is_one_trace_from_its_submission_to_its_last_chunk(
    make_service: Callable[..., Service],
    collector: Collector,
    memory: InMemorySpanExporter,
    provider: TracerProvider,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    service = make_service()
    service.start_worker(tracing="true").wait_ready()
    params = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    with Client(service.server.url, model="tiny", tracer_provider=provider) as client:
        request_id = client.submit("the wheel Zanzibar", params, tenant="acme")
        assert sum(len(chunk.token_ids) for chunk in client.stream(request_id, timeout=30)) == 6
    service.wait_until(lambda: len(collector.spans) == len(STAGES) + 1)

    sent, received = sorted(memory.get_finished_spans(), key=lambda span: span.start_time or 0)
    (worker,) = [span for span in collector.spans if span.name == "text_completion tiny"]
    stages = [span for span in collector.spans if span is not worker]
    trace_id = sent.context.trace_id.to_bytes(16, "big")
    assert {span.trace_id for span in collector.spans} == {trace_id}
    assert received.context.trace_id == sent.context.trace_id
    assert worker.parent_span_id == sent.context.span_id.to_bytes(8, "big")
    assert received.parent is not None
    assert received.parent.span_id.to_bytes(8, "big") == worker.span_id
    assert {span.parent_span_id for span in stages} == {worker.span_id}

    by_start = sorted(stages, key=lambda span: (span.start_time_unix_nano, STAGES.index(span.name)))
    assert [span.name for span in by_start] == STAGES
    for before, after in itertools.pairwise(by_start):
        assert before.end_time_unix_nano <= after.start_time_unix_nano + 1000  # rounding of floats
    assert (sent.name, received.name) == ("send headrace.tiny", "receive stream")

    said = attributes(worker)
    assert said["gen_ai.operation.name"] == "text_completion"
    assert said["gen_ai.request.model"] == said["gen_ai.response.model"] == "tiny"
    assert said["gen_ai.request.max_tokens"] == said["gen_ai.usage.output_tokens"] == 6
    assert said["gen_ai.response.id"] == said["messaging.message.id"] == request_id
    assert said["headrace.tenant"] == "acme"
    everything = f"{collector.spans} {[span.to_json() for span in memory.get_finished_spans()]}"
    assert "Zanzibar" not in everything


def test_the_exemplars_of_latencies_have_the_trace_id_of_a_sampled_request(
    make_service: Callable[..., Service],
    collector: Collector,
    memory: InMemorySpanExporter,
    provider: TracerProvider,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    prometheus_or_skip()
    service = make_service()
    worker = service.start_worker(tracing="true").wait_ready()
    params = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}

    def ask(tracer_provider: TracerProvider) -> None:
        with Client(service.server.url, model="tiny", tracer_provider=tracer_provider) as client:
            request_id = client.submit("the wheel", params)
            service.wait_ended([request_id])
            service.wait_settled()

    with Prometheus(tmp_path, {"headrace-worker": urlsplit(worker.url).netloc}) as prometheus:
        ask(TracerProvider(sampler=ALWAYS_OFF))
        prometheus.wait_until(lambda: prometheus.value("sum(headrace_requests_total)") == 1)
        assert prometheus.exemplars('{__name__=~"headrace_.+"}') == []
        ask(provider)
        trace_id = f"{memory.get_finished_spans()[0].context.trace_id:032x}"
        for histogram in ("queue_wait", "time_to_first_token", "inter_token_latency", "request_duration"):
            series = f"headrace_{histogram}_seconds_bucket"
            prometheus.wait_until(lambda series=series: prometheus.exemplars(series) != [])
            assert {found["labels"]["trace_id"] for found in prometheus.exemplars(series)} == {trace_id}
        panels = [panel for text in dashboards.rendered().values() for panel in json.loads(text)["panels"]]
        asked_for = [
            target["expr"] for panel in panels for target in panel.get("targets", []) if target.get("exemplar")
        ]
        assert len(asked_for) == 9  # each histogram in one panel
        assert [query for query in asked_for if not prometheus.exemplars(with_variables(query))] == []


def test_without_a_provider_a_message_carries_no_context(redis_server: EmbeddedServer, redis_client: Any) -> None:
    with Client(redis_server.url, check_model=False) as client:
        client.submit("a", model="one")
    headers = json.loads(redis_client.lindex(queue_name("one"), -1))["headers"]
    assert not {"traceparent", "tracestate"} & set(headers)


def test_a_subscriber_of_a_failed_request_has_the_error_in_its_span(
    redis_server: EmbeddedServer, redis_client: Any, memory: InMemorySpanExporter, provider: TracerProvider
) -> None:
    from headrace_broker.results import ErrorInfo

    writer = StreamWriter(redis_client, 60)
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    attempt = writer.claim("r1", "w", traceparent).attempt
    end = StreamWrite.end("r1", attempt, 0, finish_reason="error", error=ErrorInfo("engine_error", "lost"))
    writer.publish([end])
    with Client(redis_server.url, tracer_provider=provider) as client:
        list(client.events("r1", timeout=5))
    (span,) = memory.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert span.attributes is not None
    assert span.attributes["error.type"] == "engine_error"
    assert span.status.status_code.name == "ERROR"


def test_an_invalid_trace_context_is_no_error(redis_server: EmbeddedServer, redis_client: Any) -> None:
    StreamWriter(redis_client, 60).claim("r2", "w", "nonsense")
    provider = TracerProvider()
    with Client(redis_server.url, tracer_provider=provider) as client:
        assert next(iter(client.events("r2", timeout=5))).entry_id == "1-0"
