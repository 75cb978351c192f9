"""A real Prometheus on loopback, from the system's packages, and the queries of tests."""

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import pytest
import yaml

from headrace_broker.server.embedded import free_port

RULES = Path(__file__).resolve().parents[3] / "monitoring" / "prometheus" / "rules.yml"


def prometheus_or_skip() -> str:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not on PATH (apt-get install prometheus)")
    return program


VARIABLES = {"$__rate_interval": "10s", "$job": "headrace-worker", "$model": ".*", "$queue": ".*", "$instance": ".*"}


def with_variables(expression: str) -> str:
    """Return a panel's query with Grafana's variables filled in."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


class Prometheus:
    """Scrape the targets and evaluate the rules every `interval`.

    `shortened` maps windows of the rules to shorter ones, for tests that cannot wait that long.

    `jobs` maps a job's name to the address of its one target. Exemplars are stored.
    """

    def __init__(
        self,
        folder: Path,
        jobs: Mapping[str, str],
        *,
        interval: str = "1s",
        shortened: Mapping[str, str] | None = None,
    ) -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        rules = RULES.read_text(encoding="utf-8").replace("interval: 30s", f"interval: {interval}")
        for window, shorter in (shortened or {}).items():
            assert window in rules
            rules = rules.replace(f"[{window}]", f"[{shorter}]").replace(f"for: {window}", f"for: {shorter}")
        (folder / "rules.yml").write_text(rules, encoding="utf-8")
        config = {
            "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
            "rule_files": ["rules.yml"],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": [target]}]} for job, target in jobs.items()
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        self._log = (folder / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [
                prometheus_or_skip(),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self._port}",
                "--enable-feature=exemplar-storage",
            ],
            stdout=self._log,
            stderr=self._log,
        )

    def __enter__(self) -> Self:
        self.wait_until(self._is_ready)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the vector, or the scalar as a vector of one. An invalid query fails the test."""
        answer = self._get("query", query=expression)
        assert answer["status"] == "success", f"{expression}: {answer}"
        data = answer["data"]
        return [{"metric": {}, "value": data["result"]}] if data["resultType"] == "scalar" else data["result"]

    def value(self, expression: str) -> float | None:
        """Return the one value, or None if there is none."""
        found = self.query(expression)
        assert len(found) <= 1, f"{expression}: {found}"
        return float(found[0]["value"][1]) if found else None

    def exemplars(self, series: str) -> list[dict[str, Any]]:
        """Return the exemplars of the last hour."""
        now = time.time()
        found = self._get("query_exemplars", query=series, start=str(now - 3600), end=str(now + 60))["data"]
        return [exemplar for entry in found for exemplar in entry["exemplars"]]

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._get("rules")["data"]["groups"] for rule in group["rules"]]

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire now."""
        alerts = self._get("alerts")["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def wait_until(self, condition: Any, timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert self._process.poll() is None, "Prometheus has ended"
            assert time.monotonic() < deadline, "the condition did not become true in time"
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
                return True
        except OSError:
            return False

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            return json.load(error)
