"""What an engine does not tell is absent from the exposition, and is never 0."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from headrace_engine.core.outputs import StepStats
from headrace_monitoring.exposition import ExpositionFormat
from headrace_monitoring.metrics import Metrics
from headrace_monitoring.step_families import SOURCES
from unit.monitoring.scrape import STEP, Scrape

RULES = Path(__file__).resolve().parents[3] / "monitoring" / "prometheus" / "rules.yml"
NUMBERS = tuple(field.name for field in fields(StepStats))
DIFFERENT = ("running", "waiting", "kv_blocks_used", "kv_blocks_free", "kv_blocks_total", "phase_seconds.schedule")


def test_an_engine_that_tells_every_number_has_every_series(metrics: Metrics) -> None:
    before = set(Scrape(metrics).samples)
    metrics.steps_report_only(NUMBERS)
    metrics.step(STEP)
    assert set(Scrape(metrics).samples) == before


def test_a_number_that_the_engine_does_not_tell_has_no_series(metrics: Metrics) -> None:
    metrics.steps_report_only(DIFFERENT)
    metrics.step(replace(STEP, kv_blocks_cached=0))
    metrics.request_admitted(0.5)
    scrape = Scrape(metrics)
    assert scrape.value("headrace_kv_cache_blocks", state="used") == 30
    assert scrape.value("headrace_kv_cache_blocks", state="free") == 60
    assert scrape.value("headrace_kv_cache_usage_ratio") == 0.3
    assert scrape.value("headrace_engine_requests", state="waiting") == 2
    assert scrape.value("headrace_engine_phase_seconds_total", phase="schedule") == 0.001
    for form in ExpositionFormat:
        exposition = metrics.exposition(form).decode()
        assert 'state="cached"' not in exposition
        assert 'phase="forward"' not in exposition
        assert not any(f"{family}_" in exposition or f"{family}{{" in exposition for family in absent())


def absent() -> set[str]:
    shown = {"headrace_engine_requests", "headrace_kv_cache_blocks", "headrace_kv_cache_usage_ratio"}
    return set(SOURCES) - shown - {"headrace_engine_phase_seconds"}


def test_the_registry_itself_leaves_them_out(metrics: Metrics) -> None:
    metrics.steps_report_only(DIFFERENT)
    text = generate_latest(metrics.registry).decode()
    families = {family.name for family in text_string_to_metric_families(text)}
    assert families & set(SOURCES) == set(SOURCES) - absent()


def test_series_of_the_worker_itself_need_no_engine_that_tells_anything(metrics: Metrics) -> None:
    before = {name for name, _ in Scrape(metrics).samples}
    metrics.steps_report_only(())
    metrics.step(STEP)
    scrape = Scrape(metrics)
    assert scrape.value("headrace_engine_last_step_timestamp_seconds") == 1000.0
    assert scrape.value("headrace_engine_up") == 0
    gone = before - {name for name, _ in scrape.samples}
    assert {name.removesuffix("_total").removesuffix("_count") for name in gone} >= set(SOURCES)
    assert all(name.startswith(tuple(SOURCES)) for name in gone)


def test_the_next_engine_process_may_tell_more(metrics: Metrics) -> None:
    metrics.steps_report_only(())
    metrics.step(STEP)
    metrics.steps_report_only(("preemptions",))
    assert Scrape(metrics).value("headrace_engine_preemptions_total") == 1


def test_every_family_that_steps_feed_says_which_numbers_it_needs(metrics: Metrics) -> None:
    families = list(metrics._steps.registry.collect())
    assert {family.name for family in families} == set(SOURCES)
    for family in families:
        for sample in family.samples:
            for source in SOURCES[family.name]:
                assert source.format_map(sample.labels).partition(".")[0] in NUMBERS


def test_no_alert_fires_because_an_engine_does_not_tell_a_number() -> None:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    for rule in rules:
        for family in SOURCES:
            for expression in ("absent", "unless", "== 0", "vector"):
                assert family not in rule["expr"] or expression not in rule["expr"], rule
