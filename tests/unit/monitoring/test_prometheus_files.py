"""The files that Prometheus and Grafana read."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace_cli.demo.demo import EXPORTER_PORT, WORKER_PORT
from headrace_monitoring import buckets, dashboards
from headrace_monitoring.metrics import Metrics
from unit.monitoring.scrape import EXPORTER, GATEWAY, Scrape

pytestmark = pytest.mark.rotated("monitoring", "deploy", "docs/runbooks", "docs/monitoring.md")

ROOT = Path(__file__).resolve().parents[3]
PROMETHEUS = ROOT / "monitoring" / "prometheus"
RULE_TESTS = ("rules_test.yml", "rules_of_hours_test.yml")
RUNBOOKS = ROOT / "docs" / "runbooks"
PROVISIONING = ROOT / "monitoring" / "grafana" / "provisioning"

OTHER_NAMES = {
    sample.name for source in (EXPORTER, GATEWAY) for family in source.collect() for sample in family.samples
}


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def rules() -> list[dict[str, Any]]:
    return [rule for group in load(PROMETHEUS / "rules.yml")["groups"] for rule in group["rules"]]


@pytest.fixture(scope="module")
def alerts(rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rule for rule in rules if "alert" in rule]


def test_every_metric_in_the_rules_is_exposed(metrics: Metrics, rules: list[dict[str, Any]]) -> None:
    exposed = Scrape(metrics).names | OTHER_NAMES
    for rule in rules:
        assert set(re.findall(r"(?<!model:)\bheadrace_\w+", rule["expr"])) - exposed == set(), rule


def test_every_recorded_series_that_an_alert_reads_is_recorded(rules: list[dict[str, Any]]) -> None:
    recorded = {rule["record"] for rule in rules if "record" in rule}
    recorded.remove("headrace:workers_wanted")  # for scalers
    read = {name for rule in rules for name in re.findall(r"model:\w+:\w+", rule["expr"])}
    assert read <= recorded
    assert recorded == read


def test_thresholds_in_the_rules_are_the_objectives(metrics: Metrics, rules: list[dict[str, Any]]) -> None:
    objectives = {
        "headrace_time_to_first_token_seconds_bucket": buckets.TIME_TO_FIRST_TOKEN_OBJECTIVE,
        "headrace_inter_token_latency_seconds_bucket": buckets.INTER_TOKEN_LATENCY_OBJECTIVE,
        "headrace_queue_wait_seconds_bucket": buckets.QUEUE_WAIT_OBJECTIVE,
    }
    seen = set()
    for rule in rules:
        for name, bound in re.findall(r'(headrace_\w+_bucket)\{le="([^"]+)"\}', rule["expr"]):
            assert bound == str(objectives[name])
            assert any(found == name and ("le", bound) in labels for found, labels in Scrape(metrics).samples)
            seen.add(name)
    assert seen == set(objectives)


def test_every_alert_says_how_bad_it_is_and_what_happened(alerts: list[dict[str, Any]]) -> None:
    for alert in alerts:
        assert alert["labels"]["severity"] in {"page", "ticket"}
        assert alert["annotations"]["summary"]


def test_every_alert_links_to_a_runbook_that_says_what_to_look_at_and_what_to_do(alerts: list[dict[str, Any]]) -> None:
    for alert in alerts:
        path = ROOT / alert["annotations"]["runbook_url"]
        assert path.is_file(), f"{alert['alert']} has no runbook {path}"
        text = path.read_text(encoding="utf-8")
        assert f"`{alert['alert']}`" in text, f"{path} does not name {alert['alert']}"
        for heading in ("## Look at\n\n- ", "## Do\n\n- "):
            assert heading in text, f"{path} lacks {heading.strip()!r}"


def test_every_runbook_is_listed_belongs_to_an_alert_and_links_to_what_exists(alerts: list[dict[str, Any]]) -> None:
    pages = {path.name for path in RUNBOOKS.glob("*.md")} - {"README.md"}
    assert pages == {Path(alert["annotations"]["runbook_url"]).name for alert in alerts}
    index = (RUNBOOKS / "README.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(\w+)` \| \[[^]]+\]\(([\w-]+\.md)\) \|$", index, re.MULTILINE))
    assert listed == {alert["alert"]: Path(alert["annotations"]["runbook_url"]).name for alert in alerts}
    for page in RUNBOOKS.glob("*.md"):
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (RUNBOOKS / link).exists(), f"{page.name} links to {link}"


def test_panels_that_runbooks_name_exist() -> None:
    titles = {}
    for name, text in dashboards.rendered().items():
        built = json.loads(text)
        title = built["title"].removeprefix("Headrace: ").capitalize()
        titles[title] = [panel["title"] for panel in built["panels"]]
        assert name.removesuffix(".json") in built["uid"]
    for page in RUNBOOKS.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        named = set(re.findall(r"\*([A-Z][\w ]+)\*", text)) - {"italics"}
        assert named <= set(titles), f"{page.name}: {named - set(titles)}"
        for dashboard, panel in re.findall(r'\*([A-Z][\w ]+)\*, "([^"]+)"', text):
            assert any(title.startswith(panel) for title in titles[dashboard]), f"{page.name}: {dashboard}, {panel}"


def test_every_alert_is_tested_to_fire_and_to_stay_silent(alerts: list[dict[str, Any]]) -> None:
    tests = [test for name in RULE_TESTS for test in load(PROMETHEUS / name)["tests"]]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    fires = {case["alertname"] for case in cases if case["exp_alerts"]}
    silent = {case["alertname"] for case in cases if not case["exp_alerts"]}
    names = {alert["alert"] for alert in alerts}
    assert names - fires == set()
    assert names - silent == set()


def test_every_metric_is_in_the_handbook(metrics: Metrics) -> None:
    handbook = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    families = [*Scrape(metrics).families, *EXPORTER.collect(), *GATEWAY.collect()]
    names = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
    assert [name for name in sorted(names) if name.startswith("headrace_") and f"`{name}`" not in handbook] == []


def test_the_scraped_jobs_are_those_that_the_rules_and_dashboards_name(rules: list[dict[str, Any]]) -> None:
    jobs = {scrape["job_name"] for scrape in load(PROMETHEUS / "prometheus.yml")["scrape_configs"]}
    named = {job for rule in rules for job in re.findall(r'job="([^"]+)"', rule["expr"])}
    assert named == {job for job in jobs if job.startswith("headrace-")}
    shown = {job for text in dashboards.rendered().values() for job in re.findall(r'job=\\"([\w-]+)\\"', text)}
    assert named | shown == jobs


def test_the_ports_of_the_watched_demo_are_those_that_a_local_prometheus_scrapes() -> None:
    local, compose = load(PROMETHEUS / "local.yml"), load(PROMETHEUS / "prometheus.yml")
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in local["scrape_configs"]}
    assert targets == {
        "headrace-worker": [f"127.0.0.1:{WORKER_PORT}"],
        "headrace-exporter": [f"127.0.0.1:{EXPORTER_PORT}"],
    }
    assert {key: local[key] for key in ("global", "rule_files")} == {
        key: compose[key] for key in ("global", "rule_files")
    }


def test_grafana_finds_the_data_source_and_the_dashboards(rules: list[dict[str, Any]]) -> None:
    (source,) = load(PROVISIONING / "datasources" / "prometheus.yml")["datasources"]
    assert (source["uid"], source["type"], source["isDefault"]) == ("headrace-prometheus", "prometheus", True)
    assert source["jsonData"]["timeInterval"] == load(PROMETHEUS / "prometheus.yml")["global"]["scrape_interval"]
    (provider,) = load(PROVISIONING / "dashboards" / "headrace.yml")["providers"]
    compose = load(ROOT / "docker-compose.yml")
    watch = load(ROOT / "deploy" / "compose" / "watch.yml")
    for stack, root in ((compose, "./"), (watch, "../../")):
        grafana = stack["services"]["grafana"]
        mounts = dict(volume.split(":")[:2] for volume in grafana["volumes"])
        assert mounts[f"{root}monitoring/grafana/dashboards"] == provider["options"]["path"]
        assert source["url"].removeprefix("$") in grafana["environment"]
    assert ROOT / "monitoring" / "grafana" / "dashboards" == dashboards.FOLDER


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "config", "local.yml"),
        ("check", "rules", "--lint=all", "rules.yml"),
        *(("test", "rules", name) for name in RULE_TESTS),
    ],
    ids=" ".join,
)
def test_promtool_accepts_the_configuration_and_the_rules(arguments: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not on PATH (it comes with Prometheus)")
    done = subprocess.run(
        [promtool, *arguments], cwd=PROMETHEUS, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
