"""Every query of every panel and rule, on a real Prometheus that scrapes a real worker and an exporter."""

import json
import re
from datetime import UTC, datetime, timedelta

import pytest
import yaml

from headrace_monitoring import dashboards
from service.operations.conftest import Watched
from service.operations.prometheus import RULES, with_variables

pytestmark = pytest.mark.rotated_file("monitoring")

PANELS = [
    (f"{name}: {panel['title']}", target["expr"])
    for name, text in dashboards.rendered().items()
    for panel in json.loads(text)["panels"]
    for target in panel.get("targets", [])
    if not re.search("headrace_((pooled|truncated)_inputs|earliest_slack|stream_server_)", target["expr"])
]
"""Without those of models that embed or score, as this worker generates: `test_pooling.py` reads their metrics. Without
that of messages that wait with a deadline, as none is left waiting, and those of stream servers, as there are none:
`test_exporter.py` and `test_stream_homes.py` read them."""


def test_every_query_of_every_panel_returns_data(watched: Watched) -> None:
    empty = [panel for panel, expression in PANELS if not watched.prometheus.query(with_variables(expression))]
    assert empty == []


def test_every_rule_evaluates_and_every_recorded_series_has_data(watched: Watched) -> None:
    watched.prometheus.wait_until(lambda: all(rule["health"] != "unknown" for rule in watched.prometheus.rules()))
    rules = watched.prometheus.rules()
    assert len(rules) == sum(len(group["rules"]) for group in yaml.safe_load(RULES.read_text())["groups"])
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []
    recorded = [rule["name"] for rule in rules if rule["type"] == "recording"]
    assert [name for name in recorded if not watched.prometheus.query(name)] == []


def test_every_series_that_an_alert_reads_exists(watched: Watched) -> None:
    selectors = {
        selector
        for rule in watched.prometheus.rules()
        for selector in re.findall(r"headrace_\w+(?:\{[^}]*\})?", rule["query"])
        if not re.search(r":" + re.escape(selector.partition("{")[0]), rule["query"])
    }
    assert len(selectors) > 20
    absent = [selector for selector in sorted(selectors) if not watched.prometheus.query(selector)]
    assert absent == ["headrace_stream_server_up"], "there is no stream server"


def test_every_exposed_metric_is_shown_by_a_panel(watched: Watched) -> None:
    exposed = {row["metric"]["__name__"] for row in watched.prometheus.query('{__name__=~"headrace_.+"}')}
    shown = set(re.findall(r"headrace_\w+", " ".join(expression for _, expression in PANELS)))

    def family(name: str) -> str:
        return re.sub(r"_(total|bucket|sum|count)$", "", name)

    assert {family(name) for name in exposed} == {family(name) for name in shown}


def test_a_healthy_service_under_load_raises_no_alert(watched: Watched) -> None:
    watched.load()
    assert watched.prometheus.firing() == set()


@pytest.mark.parametrize("stage", ["queue_wait", "engine_queue", "engine_prefill", "engine_decode"])
def test_the_stages_of_a_request_are_measured_by_a_real_worker(watched: Watched, stage: str) -> None:
    value = watched.prometheus.value
    assert (value(f"sum(headrace_{stage}_seconds_count)") or 0) >= 12
    total = value("sum(headrace_request_duration_seconds_sum)")
    assert total is not None
    assert 0 < (value(f"sum(headrace_{stage}_seconds_sum)") or 0) < total


def test_a_real_worker_counts_each_tenant_separately(watched: Watched) -> None:
    value = watched.prometheus.value
    assert (value('headrace_tenant_requests_total{tenant="acme",outcome="length"}') or 0) >= 6
    assert (value('headrace_tenant_requests_total{tenant="none",outcome="length"}') or 0) >= 6
    assert value('headrace_tenant_tokens_total{tenant="other",kind="generated"}') == 0


def test_a_request_that_expired_in_the_queue_counts_for_its_tenant(watched: Watched) -> None:
    past = datetime.now(UTC) - timedelta(seconds=1)
    watched.service.send({"prompt": "x"}, headers={"tenant": "acme"}, expires=past)
    expired = 'headrace_tenant_requests_total{tenant="acme",outcome="expired"}'
    watched.prometheus.wait_until(lambda: (watched.prometheus.value(expired) or 0) >= 1)
