"""docker-compose.yml and the Dockerfile, as far as they can be checked without a container engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
OURS = (ROOT / "Dockerfile", ROOT / "deploy" / "cuda" / "Dockerfile")
DOCKERFILES = (*OURS, ROOT / "deploy" / "neuron" / "Dockerfile")


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
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_watches_a_service_on_this_host_has_the_same_images_and_listens_to_this_host_alone(
    services: dict[str, Any],
) -> None:
    path = ROOT / "deploy" / "compose" / "watch.yml"
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    watch = yaml.safe_load(path.read_text(encoding="utf-8"))["services"]
    assert {name: service["image"] for name, service in watch.items()} == {
        name: services[name]["image"] for name in ("prometheus", "grafana")
    }
    assert "--web.listen-address=127.0.0.1:9090" in watch["prometheus"]["command"]
    assert watch["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"


def test_images_are_pinned_to_a_release(services: dict[str, Any]) -> None:
    images = [service["image"] for service in services.values() if "image" in service]
    for dockerfile in OURS:
        images += re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", dockerfile.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(images) == 5  # redis, prometheus, grafana, and what ours are built on
    for image in images:
        assert re.search(r":v?\d+\.\d+\.\d+", image), image


def test_every_service_has_a_healthcheck(services: dict[str, Any]) -> None:
    assert [name for name, service in services.items() if "healthcheck" not in service] == []


def test_the_queue_keeps_its_messages(services: dict[str, Any]) -> None:
    command = " ".join(services["redis"]["command"])
    assert "--appendonly yes --appendfsync everysec" in command
    assert "--maxmemory-policy noeviction" in command
    assert "--aclfile /etc/valkey/users.acl" in command
    assert "redis-data:/data" in services["redis"]["volumes"]


def test_the_redis_users_of_the_compose_file_are_those_of_the_file_for_other_installations() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    users = (ROOT / "deploy" / "redis" / "users.acl").read_text(encoding="utf-8")
    assert re.sub(r":\?[^}]*\}", "}", compose["configs"]["redis-users"]["content"]) == users


def test_redis_and_the_metrics_are_not_published(services: dict[str, Any]) -> None:
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert published == {"grafana": ["127.0.0.1:3000:3000"]}
    assert services["redis"]["networks"] == services["worker"]["networks"] == ["backend"]


def test_the_worker_is_not_killed_before_its_grace_time_is_over(services: dict[str, Any]) -> None:
    worker = services["worker"]
    assert int(worker["stop_grace_period"].removesuffix("s")) > int(worker["environment"]["HEADRACE_GRACE_SECONDS"])


def test_no_password_has_a_default(services: dict[str, Any]) -> None:
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    passwords = set(re.findall(r"\$\{(\w+_PASSWORD)(:?\??)", text))
    assert {after for _, after in passwords} == {":?"}  # without it nothing starts
    made = subprocess.run([ROOT / "deploy" / "compose" / "make-env"], capture_output=True, text=True, check=True)
    fresh = dict(line.split("=") for line in made.stdout.splitlines())
    assert set(fresh) == {name for name, _ in passwords}
    assert all(re.fullmatch(r"[0-9a-f]{48}", password) for password in fresh.values())
    assert len(set(fresh.values())) == len(fresh)


def test_every_service_has_a_limit_of_memory_or_all_of_a_gpu_host(services: dict[str, Any]) -> None:
    for name, service in services.items():
        resources = service["deploy"]["resources"]
        assert ("memory" in resources.get("limits", {})) is (name != "worker-gpu"), name


def test_the_gpu_worker_differs_from_the_other_one_only_in_its_image_and_its_device(services: dict[str, Any]) -> None:
    cpu, gpu = services["worker"], services["worker-gpu"]
    assert gpu["profiles"] == ["gpu"]
    assert gpu["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    different = {key for key in cpu.keys() | gpu.keys() if cpu.get(key) != gpu.get(key)}
    assert different == {"profiles", "build", "deploy", "environment"}
    assert (ROOT / gpu["build"]["dockerfile"]).is_file()
    assert {key for key in cpu["environment"] if cpu["environment"][key] != gpu["environment"][key]} == {
        "HEADRACE_DEVICE"
    }


def test_the_neuron_worker_has_its_device_and_time_to_compile(services: dict[str, Any]) -> None:
    cpu, neuron = services["worker"], services["worker-neuron"]
    assert neuron["profiles"] == ["neuron"]
    assert neuron["devices"] == ["${HEADRACE_NEURON_DEVICE:-/dev/neuron0}"]
    different = {key for key in cpu.keys() | neuron.keys() if cpu.get(key) != neuron.get(key)}
    assert different == {"profiles", "build", "environment", "devices", "volumes", "healthcheck"}
    assert (ROOT / neuron["build"]["dockerfile"]).is_file()
    assert neuron["environment"]["HEADRACE_DEVICE"] == "neuron"
    assert f"neuron-compile-cache:{neuron['environment']['HEADRACE_COMPILE_CACHE_DIR']}" in neuron["volumes"]


def test_the_counters_of_the_neuron_devices_are_collected(services: dict[str, Any]) -> None:
    worker, monitor = services["worker-neuron"], services["neuron-monitor"]
    assert {key: monitor[key] for key in ("profiles", "build", "devices")} == {
        key: worker[key] for key in ("profiles", "build", "devices")
    }
    assert monitor["entrypoint"][-1].endswith("neuron-monitor | neuron-monitor-prometheus.py --port 8000")


def test_prometheus_scrapes_every_service_that_has_metrics(services: dict[str, Any]) -> None:
    config = yaml.safe_load((ROOT / "monitoring" / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    scraped = {
        (name, found["port"])
        for scrape in config["scrape_configs"]
        for found in scrape["dns_sd_configs"]
        for name in found["names"]
    }
    workers = {name for name in services if name.startswith("worker")}
    assert scraped == {*((name, 9464) for name in workers), ("exporter", 9465), ("neuron-monitor", 8000)}


def test_the_worker_runs_without_privileges(services: dict[str, Any]) -> None:
    for path in DOCKERFILES:
        dockerfile = path.read_text(encoding="utf-8")
        assert re.search(r"^USER 10001:10001$", dockerfile, re.MULTILINE), path
        assert 'ENTRYPOINT ["headrace", "worker"]' in dockerfile, path
    assert services["worker"]["cap_drop"] == ["ALL"]
    assert services["worker"]["read_only"] is True


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)
def test_a_dockerfile_has_nothing_that_hadolint_minds(path: Path) -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed (make ops-tools)")
    done = subprocess.run([hadolint, "--no-color", str(path)], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.parent.name)
def test_an_image_takes_in_only_what_the_builder_is_given_and_knows_whether_it_is_well(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    given = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)
    for name in " ".join(copied).split():
        assert (ROOT / name).exists(), name
        assert f"!{name}" in given, name
    (probe,) = re.findall(r"^HEALTHCHECK .*\\\n +CMD (\[.+\])$", text, re.MULTILINE)
    command = json.loads(probe)  # Docker reads the exec form as JSON
    assert command[:2] == ["python", "-c"]
    answers = subprocess.run(
        [sys.executable, *command[1:]], env={"HEADRACE_METRICS_PORT": "1"}, capture_output=True, check=False
    )
    assert answers.returncode == 1  # nobody listens there
    assert b"Connection refused" in answers.stderr
