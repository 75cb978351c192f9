"""docker-compose.yml and the Dockerfile, as far as they can be checked without a container engine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]


def test_compose_file_follows_the_compose_specification() -> None:
    command = [
        sys.executable,
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        "vendor.compose-spec",
        "docker-compose.yml",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_images_are_pinned_to_a_release(services: dict[str, Any]) -> None:
    images = [service["image"] for service in services.values() if "image" in service]
    images += re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(images) == 4
    for image in images:
        assert re.search(r":v?\d+\.\d+\.\d+", image), image


def test_every_service_has_a_healthcheck(services: dict[str, Any]) -> None:
    assert [name for name, service in services.items() if "healthcheck" not in service] == []


def test_the_queue_keeps_its_messages(services: dict[str, Any]) -> None:
    command = " ".join(services["redis"]["command"])
    assert "--appendonly yes --appendfsync everysec" in command
    assert "--maxmemory-policy noeviction" in command
    assert "redis-data:/data" in services["redis"]["volumes"]


def test_redis_and_the_metrics_are_not_published(services: dict[str, Any]) -> None:
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert published == {"grafana": ["127.0.0.1:3000:3000"]}
    assert services["redis"]["networks"] == services["worker"]["networks"] == ["backend"]


def test_the_worker_is_not_killed_before_its_grace_time_is_over(services: dict[str, Any]) -> None:
    worker = services["worker"]
    assert int(worker["stop_grace_period"].removesuffix("s")) > int(worker["environment"]["HEADRACE_GRACE_SECONDS"])


def test_no_password_has_a_default(services: dict[str, Any]) -> None:
    assert services["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"].startswith("${GRAFANA_ADMIN_PASSWORD:?")


def test_the_worker_runs_without_privileges(services: dict[str, Any]) -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert re.search(r"^USER 10001:10001$", dockerfile, re.MULTILINE)
    assert 'ENTRYPOINT ["headrace", "worker"]' in dockerfile
    assert services["worker"]["cap_drop"] == ["ALL"]
    assert services["worker"]["read_only"] is True
