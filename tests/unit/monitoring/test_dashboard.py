"""The dashboards: up to date, complete, and showing what is exposed."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest

from headrace_monitoring import dashboards
from headrace_monitoring.metrics import Metrics
from unit.monitoring.neuron_monitor import FAMILIES
from unit.monitoring.scrape import EXPORTER, GATEWAY, Scrape

METRIC = re.compile(r"\b(?:headrace|process)_[a-z_]+\b")
# What a process shows of itself, and what the exporter and the gateway alone show, has no model: the selection does
# not reach it.
UNSELECTED = re.compile(r"headrace_(?:exporter|gateway|stream_server_|redis_(?!up|command|errors))")

RENDERED = dashboards.rendered()
BUILT: dict[str, dict[str, Any]] = {name: json.loads(text) for name, text in RENDERED.items()}


def panels_of(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


ALL_PANELS = [panel for dashboard in BUILT.values() for panel in panels_of(dashboard)]
EXPRESSIONS = [target["expr"] for panel in ALL_PANELS for target in panel["targets"]]


@pytest.fixture(params=BUILT)
def dashboard(request: pytest.FixtureRequest) -> dict[str, Any]:
    return BUILT[request.param]


@pytest.fixture
def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return panels_of(dashboard)


@pytest.fixture
def samples(metrics: Metrics) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    """Everything that a worker, an exporter or a gateway exposes."""
    others = {
        (sample.name, frozenset(sample.labels.items()))
        for source in (EXPORTER, GATEWAY)
        for family in source.collect()
        for sample in family.samples
    }
    return set(Scrape(metrics).samples) | others


def test_the_committed_files_are_what_the_code_writes() -> None:
    committed = {path.name: path.read_text(encoding="utf-8") for path in dashboards.FOLDER.glob("*.json")}
    assert set(committed) == set(RENDERED)
    for name, text in RENDERED.items():
        assert committed[name] == text, "run python -m headrace_monitoring.dashboards"


def test_the_schema_is_that_of_the_grafana_that_compose_starts(dashboard: dict[str, Any]) -> None:
    assert dashboard["schemaVersion"] == 41  # Grafana 11.6
    assert dashboard["editable"] is False
    assert dashboard["uid"].startswith("headrace-")


def test_every_panel_explains_itself(panels: list[dict[str, Any]]) -> None:
    for panel in panels:
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["targets"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
    assert len({panel["title"] for panel in panels}) == len(panels)


def test_panel_ids_are_unique_and_no_two_panels_overlap(dashboard: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    for a, b in itertools.combinations(places, 2):
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart, f"{a} overlaps {b}"


def test_the_dashboards_have_the_same_variables_and_lead_to_each_other(dashboard: dict[str, Any]) -> None:
    names = [variable["name"] for variable in dashboard["templating"]["list"]]
    assert names == ["datasource", "job", "model", "queue", "instance"]
    (link,) = dashboard["links"]
    assert (link["type"], link["tags"], link["includeVars"]) == ("dashboards", ["headrace"], True)
    assert "headrace" in dashboard["tags"]


def test_the_selection_reaches_every_query_that_it_can_reach() -> None:
    for expression in EXPRESSIONS:
        for metric in METRIC.finditer(expression):
            if UNSELECTED.match(metric[0]):
                continue
            selection = expression[metric.end() :].partition("}")[0]
            if "(" in selection.partition("{")[0]:
                pytest.fail(f"{metric[0]} has no selection in {expression}")
            if metric[0].startswith("process_"):
                # the gateway has a job of its own, which the variables do not know
                assert 'job=~"$job",instance=~"$instance"' in selection or 'job="headrace-gateway"' in selection
            else:
                assert 'model=~"$model"' in selection, expression
                assert ('job=~"$job"' in selection) is ('instance=~"$instance"' in selection)


def test_counters_are_shown_as_rates_over_a_range_that_fits_the_scrape_interval() -> None:
    for expression in EXPRESSIONS:
        for window in re.findall(r"\[([^\]]+)\]", expression):
            assert window in {"$__rate_interval", "5m", "1h"}
        for counter in re.finditer(r"\b\w+_(?:total|bucket|sum|count)\b[{\[]", expression):
            assert expression[: counter.start()].endswith(("rate(", "increase(")), expression


def test_queue_levels_are_not_multiplied_by_the_number_of_workers() -> None:
    levels = (
        r"headrace_(?:queue_(?:messages|ready_messages|oldest_message_age_seconds|run_out_leases|dead_letters)"
        r"|outstanding_tokens|earliest_slack_seconds)\{"
    )
    for expression in EXPRESSIONS:
        for level in re.finditer(levels, expression):
            assert re.search(r"max by \([a-z, ]+\) \($", expression[: level.start()]), expression


def test_every_metric_shown_is_exposed(samples: set[tuple[str, Any]]) -> None:
    shown = {name for expression in EXPRESSIONS for name in METRIC.findall(expression)}
    assert shown - {name for name, _ in samples} == set()


def test_every_family_exposed_is_shown(samples: set[tuple[str, Any]]) -> None:
    def family(name: str) -> str:
        return re.sub(r"_(total|bucket|sum|count)$", "", name)

    shown = {family(name) for name in METRIC.findall(" ".join(EXPRESSIONS))}
    exposed = {family(name) for name, _ in samples if name.startswith("headrace_")}
    assert exposed - shown == set()


def test_every_counter_of_neuron_devices_is_shown_by_its_labels() -> None:
    expressions = [target["expr"] for panel in panels_of(BUILT["neuron.json"]) for target in panel["targets"]]
    text = " ".join(expressions)
    for name, labels in FAMILIES.items():
        assert re.search(rf"\b{name}\b", text), name
        if len(labels) == 1 and "memory_usage" not in name:
            assert any(name in found and f"{next(iter(labels))})" in found for found in expressions), name
    assert all('job="neuron-monitor"' in expression for expression in expressions)


def test_labels_in_queries_exist(samples: set[tuple[str, Any]]) -> None:
    known = {label for _, have in samples for label, _ in have} | {"instance", "job"}  # Prometheus adds these
    known |= {label for labels in FAMILIES.values() for label in labels}
    for expression in EXPRESSIONS:
        for name, label, value in re.findall(r'(headrace_\w+)\{[^}]*?,(le|state|kind)="([^"]+)"\}', expression):
            assert any(found == name and (label, value) in labels for found, labels in samples), expression
        for labels in re.findall(r"by \(([a-z, ]+)\)", expression):
            assert set(labels.split(", ")) <= known, expression
