"""The dashboard: up to date, complete, and showing what is exposed."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest

from headrace_monitoring import dashboards
from headrace_monitoring.metrics import Metrics
from unit.monitoring.scrape import Scrape

METRIC = re.compile(r"\b(?:headrace|process)_[a-z_]+\b")


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads(dashboards.render(dashboards.overview()))


@pytest.fixture(scope="module")
def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def expressions(panels: list[dict[str, Any]]) -> list[str]:
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_the_committed_file_is_what_the_code_writes() -> None:
    committed = (dashboards.DASHBOARDS / "overview.json").read_text(encoding="utf-8")
    assert committed == dashboards.render(dashboards.overview()), "run python -m headrace_monitoring.dashboards"


def test_the_schema_is_that_of_the_grafana_that_compose_starts(dashboard: dict[str, Any]) -> None:
    assert dashboard["schemaVersion"] == 41  # Grafana 11.6
    assert dashboard["editable"] is False
    assert dashboard["uid"] == "headrace-overview"


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


def test_the_selection_reaches_every_query(dashboard: dict[str, Any], panels: list[dict[str, Any]]) -> None:
    names = [variable["name"] for variable in dashboard["templating"]["list"]]
    assert names == ["datasource", "job", "model", "instance"]
    for expression in expressions(panels):
        for metric in METRIC.finditer(expression):
            selection = expression[metric.end() :].partition("}")[0]
            if "(" in selection.partition("{")[0]:
                pytest.fail(f"{metric[0]} has no selection in {expression}")
            assert 'job=~"$job"' in selection
            assert 'instance=~"$instance"' in selection
            assert ('model=~"$model"' in selection) is metric[0].startswith("headrace_")


def test_counters_are_shown_as_rates_over_a_range_that_fits_the_scrape_interval(panels: list[dict[str, Any]]) -> None:
    for expression in expressions(panels):
        for window in re.findall(r"\[([^\]]+)\]", expression):
            assert window in {"$__rate_interval", "5m", "1h"}
        for counter in re.finditer(r"\w+_(?:total|bucket|sum|count)\{", expression):
            assert expression[: counter.start()].endswith(("rate(", "increase(")), expression


def test_queue_levels_are_not_multiplied_by_the_number_of_workers(panels: list[dict[str, Any]]) -> None:
    for expression in expressions(panels):
        for level in re.finditer(r"headrace_queue_(?:messages|oldest_message_age_seconds)\{", expression):
            assert re.search(r"max by \([a-z, ]+\) \($", expression[: level.start()]), expression


def test_every_metric_shown_is_exposed(metrics: Metrics, panels: list[dict[str, Any]]) -> None:
    shown = {name for expression in expressions(panels) for name in METRIC.findall(expression)}
    assert shown - Scrape(metrics).names == set()


def test_every_family_exposed_is_shown(metrics: Metrics, panels: list[dict[str, Any]]) -> None:
    shown = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in METRIC.findall(" ".join(expressions(panels)))}
    exposed = {family.name for family in Scrape(metrics).families if family.name.startswith("headrace_")}
    assert exposed - shown == set()


def test_labels_in_queries_exist(metrics: Metrics, panels: list[dict[str, Any]]) -> None:
    samples = Scrape(metrics).samples
    for expression in expressions(panels):
        for name, label, value in re.findall(r'(headrace_\w+)\{[^}]*?,(le|state)="([^"]+)"\}', expression):
            assert any(found == name and (label, value) in labels for found, labels in samples), expression
        for labels in re.findall(r"by \(([a-z, ]+)\)", expression):
            known = {label for _, have in samples for label, _ in have} | {"instance", "job"}  # Prometheus adds these
            assert set(labels.split(", ")) <= known, expression
