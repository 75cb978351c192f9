"""Which form a scrape gets, that both are well formed, and where exemplars stand."""

from __future__ import annotations

from collections import Counter

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from headrace_monitoring.exposition import ExpositionFormat, render
from headrace_monitoring.labels import LabelSets
from headrace_monitoring.metrics import Metrics, Publication
from unit.monitoring.scrape import EXPORTER, PROMETHEUS_ACCEPTS, STEP

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("", ExpositionFormat.TEXT),
        ("*/*", ExpositionFormat.TEXT),
        ("text/plain;version=0.0.4", ExpositionFormat.TEXT),
        (PROMETHEUS_ACCEPTS, ExpositionFormat.OPENMETRICS),
        ("application/openmetrics-text; version=1.0.0; escaping=allow-utf-8; q=0.6", ExpositionFormat.OPENMETRICS),
        ("Application/OpenMetrics-Text", ExpositionFormat.OPENMETRICS),
        ('application/openmetrics-text;version="1.0.0"', ExpositionFormat.OPENMETRICS),
        ("application/openmetrics-text;version=0.0.1", ExpositionFormat.TEXT),
        ("application/openmetrics-text;version=2.0.0", ExpositionFormat.TEXT),
        ("application/openmetrics-text;q=0", ExpositionFormat.TEXT),
        ("application/openmetrics-text;q=0.0,*/*", ExpositionFormat.TEXT),
        ("application/openmetrics-text;version;=;q=x", ExpositionFormat.TEXT),
    ],
)
def test_the_form_is_the_one_that_the_scraper_asks_for(accept: str, form: ExpositionFormat) -> None:
    assert ExpositionFormat.asked_for(accept) is form


def request(metrics: Metrics, trace_id: str | None) -> None:
    metrics.message_received(3, 0.2, trace_id=trace_id)
    metrics.request_started()
    metrics.request_admitted(0.03, trace_id=trace_id)
    metrics.first_token(0.4, 0.3, 0.2, trace_id=trace_id)
    metrics.published(Publication(4, Counter({(4, 0.08, trace_id): 1})))
    metrics.request_finished("stop", 3.0, 10, 0, 5, decode_seconds=2.0, decoded_tokens=4, trace_id=trace_id)


def exemplars(metrics: Metrics) -> dict[str, dict[str, str]]:
    """Labels of the exemplars, by histogram."""
    text = metrics.exposition(ExpositionFormat.OPENMETRICS).decode()
    return {
        family.name: dict(sample.exemplar.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.exemplar
    }


def test_every_latency_of_a_traced_request_has_its_trace_as_exemplar(metrics: Metrics) -> None:
    metrics.step(STEP)
    request(metrics, TRACE)
    latencies = {
        "headrace_queue_wait_seconds",
        "headrace_time_to_first_token_seconds",
        "headrace_engine_time_to_first_token_seconds",
        "headrace_inter_token_latency_seconds",
        "headrace_request_duration_seconds",
        "headrace_request_time_per_output_token_seconds",
        "headrace_engine_queue_seconds",
        "headrace_engine_prefill_seconds",
        "headrace_engine_decode_seconds",
    }
    assert exemplars(metrics) == {histogram: {"trace_id": TRACE} for histogram in latencies}
    assert TRACE not in metrics.exposition().decode()  # the plain text has no place for it


def test_a_request_without_a_recorded_trace_leaves_no_exemplar(metrics: Metrics) -> None:
    request(metrics, None)
    assert exemplars(metrics) == {}


def test_what_is_written_is_what_prometheus_client_writes(metrics: Metrics) -> None:
    odd = Metrics(model='a "b"\\c\nd', queue="été", label_sets=LabelSets(tenants=("x\\n",)))
    for found in (metrics, odd):
        request(found, TRACE)
    for registry in (metrics.registry, odd.registry, EXPORTER.registry):
        for form, write in ((ExpositionFormat.TEXT, generate_latest), (ExpositionFormat.OPENMETRICS, openmetrics)):
            ours, theirs = (text.decode().splitlines() for text in (render(registry, form), write(registry)))
            moving = "process_"  # of this process, at that moment
            assert [line for line in ours if moving not in line] == [line for line in theirs if moving not in line]


def test_both_expositions_are_well_formed_openmetrics_with_the_same_values(metrics: Metrics) -> None:
    request(metrics, TRACE)
    for exposition in (metrics.exposition, EXPORTER.exposition):
        text = exposition(ExpositionFormat.OPENMETRICS).decode()
        families = list(text_string_to_metric_families(text))
        plain = {line for line in exposition().decode().splitlines() if line.startswith("headrace_")}
        without_exemplars = {line.partition(" # ")[0] for line in text.splitlines() if line.startswith("headrace_")}
        assert without_exemplars == plain
        assert len(families) > 10
