"""docker-compose.yml and the Dockerfile, as far as they can be checked without a container engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from headrace_workers.cli.gateway import gateway as gateway_command
from headrace_workers.settings import WorkerSettings

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
        images += re.findall(r"^ARG \w+_IMAGE=(\S+)$", dockerfile.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(images) == 6  # redis, prometheus, grafana, and what ours are built on
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
    assert published == {
        "grafana": ["127.0.0.1:3000:3000"],
        "gateway": ["127.0.0.1:${HEADRACE_GATEWAY_PORT:-8000}:8000"],
    }
    assert services["redis"]["networks"] == services["worker"]["networks"] == ["backend"]


def test_the_worker_is_not_killed_before_its_grace_time_is_over(services: dict[str, Any]) -> None:
    worker = services["worker"]
    assert int(worker["stop_grace_period"].removesuffix("s")) > int(worker["environment"]["HEADRACE_GRACE_SECONDS"])


def test_the_gateway_has_keys_its_own_redis_user_and_time_for_open_answers(services: dict[str, Any]) -> None:
    gateway = services["gateway"]
    environment = gateway["environment"]
    assert environment["HEADRACE_REDIS_URL"].startswith("redis://gateway:${REDIS_GATEWAY_PASSWORD:?")
    keys, files = gateway["volumes"]
    folder, target, mode = keys.rsplit(":", 2)
    assert (folder, mode) == ("${HEADRACE_GATEWAY_KEYS_DIR:-./keys}", "ro")
    assert environment["HEADRACE_GATEWAY_KEYS"].startswith(f"{target}/")
    assert files == f"gateway-files:{environment['HEADRACE_GATEWAY_FILES']}"
    assert int(gateway["stop_grace_period"].removesuffix("s")) > int(environment["HEADRACE_GATEWAY_SHUTDOWN"])
    assert "/ready" in gateway["healthcheck"]["test"][-1]
    assert gateway["cap_drop"] == ["ALL"]
    assert gateway["read_only"] is True
    assert "/keys/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


def test_the_environment_of_the_gateway_are_options_that_it_has(services: dict[str, Any]) -> None:
    known = {option.envvar for option in gateway_command.params if isinstance(option, click.Option)}
    image = re.findall(r"(HEADRACE_GATEWAY_\w+)=", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    assert len(image) == 4
    assert {*services["gateway"]["environment"], *image} <= known


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
        assert ("memory" in resources.get("limits", {})) is (name not in ("worker-gpu", "worker-vllm")), name


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


def test_the_vllm_worker_has_all_gpus_shared_memory_and_a_place_for_what_it_compiled(services: dict[str, Any]) -> None:
    cpu, vllm = services["worker"], services["worker-vllm"]
    assert vllm["profiles"] == ["vllm"]
    different = {key for key in cpu.keys() | vllm.keys() if cpu.get(key) != vllm.get(key)}
    assert different == {"profiles", "build", "environment", "volumes", "shm_size", "healthcheck", "deploy"}
    assert vllm["build"] == {"context": ".", "target": "vllm"}
    (gpus,) = vllm["deploy"]["resources"]["reservations"]["devices"]
    assert gpus == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert f"vllm-compile-cache:{vllm['environment']['VLLM_CACHE_ROOT']}" in vllm["volumes"]
    assert vllm["volumes"][0] == cpu["volumes"][0]
    stage = stages(ROOT / "Dockerfile")["vllm"]
    assert f"chown 10001:10001 {vllm['environment']['VLLM_CACHE_ROOT']}" in stage  # or it could not write there


@pytest.mark.parametrize("service", ["worker", "worker-gpu", "worker-vllm", "worker-neuron"])
def test_the_environment_of_a_worker_are_options_that_its_engine_has(
    services: dict[str, Any], service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8") if service == "worker-vllm" else ""
    image = dict(re.findall(r"(HEADRACE_ENGINE\w*)=(\S+)", text))
    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        monkeypatch.delenv(name)
    for name, value in {**image, **services[service]["environment"]}.items():
        monkeypatch.setenv(name, re.sub(r"\$\{\w+(?::-([^}]*)|:\?[^}]*)?\}", r"\1", str(value)))
    monkeypatch.setenv("HEADRACE_SERVED_MODEL_NAME", "tiny")
    if service == "worker-vllm":
        monkeypatch.setenv("HEADRACE_ENGINE_PYTHON", sys.executable)  # the image's
    config = WorkerSettings.from_env().engine_config()
    assert config.engine == ("vllm" if service == "worker-vllm" else "headrace")


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
    assert scraped == {
        *((name, 9464) for name in workers),
        ("exporter", 9465),
        ("gateway", 9466),
        ("neuron-monitor", 8000),
    }


def test_the_worker_runs_without_privileges(services: dict[str, Any]) -> None:
    for path in DOCKERFILES:
        dockerfile = path.read_text(encoding="utf-8")
        assert re.search(r"^USER 10001:10001$", dockerfile, re.MULTILINE), path
        assert dockerfile.rstrip().endswith('ENTRYPOINT ["headrace", "worker"]'), path  # of the last stage, the default
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
    probes = re.findall(r"^HEALTHCHECK .*\\\n +CMD (\[.+\])$", text, re.MULTILINE)
    assert len(probes) == text.count("ENTRYPOINT")
    for probe in probes:
        command = json.loads(probe)  # Docker reads the exec form as JSON
        assert command[:2] == ["python", "-c"]
        ports = {"HEADRACE_METRICS_PORT": "1", "HEADRACE_GATEWAY_PORT": "1"}
        answers = subprocess.run([sys.executable, *command[1:]], env=ports, capture_output=True, check=False)
        assert answers.returncode == 1  # nobody listens there
        assert b"Connection refused" in answers.stderr


def stages(dockerfile: Path) -> dict[str, str]:
    """The text of each named stage, without comments."""
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(re.findall(r"^FROM \S+ AS ([\w-]+)\n(.*?)(?=^FROM )", text, re.M | re.S))


def test_the_image_of_the_gateway_has_no_torch_and_no_compiler() -> None:
    found = stages(ROOT / "Dockerfile")
    assert '".[gateway]"' in found["gateway-build"]
    assert "torch" not in found["gateway-build"] + found["gateway"]
    assert "apt-get" not in found["gateway"]
    assert "COPY --from=gateway-build " in found["gateway"]
    assert "USER 10001:10001" in found["gateway"]
    assert found["gateway"].rstrip().endswith('ENTRYPOINT ["headrace", "gateway"]')


def test_the_image_of_vllm_keeps_vllm_in_the_interpreter_of_its_own_image() -> None:
    text, found = (ROOT / "Dockerfile").read_text(encoding="utf-8"), stages(ROOT / "Dockerfile")
    assert len(re.findall(r"^FROM \$\{VLLM_IMAGE\} AS vllm(?:-build)?$", text, re.MULTILINE)) == 2
    assert '".[vllm,tracing]"' in found["vllm-build"]
    assert "apt-get" not in found["vllm-build"] + found["vllm"]
    assert "COPY --from=vllm-build /opt/headrace /opt/headrace" in found["vllm"]
    # the environment is made with the interpreter that it runs with: the two stages have one base
    assert "RUN /usr/bin/python3 -m venv /opt/headrace" in found["vllm-build"]
    assert "HEADRACE_ENGINE=vllm " in found["vllm"]
    assert "HEADRACE_ENGINE_PYTHON=/usr/bin/python3 " in found["vllm"]
    assert "USER 10001:10001" in found["vllm"]
    assert found["vllm"].rstrip().endswith('ENTRYPOINT ["headrace", "worker"]')


def test_an_image_is_built_from_every_package_of_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {path.partition("/")[0] for path in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    for path in DOCKERFILES:
        text = path.read_text(encoding="utf-8")
        builds = text.count('pip install --constraint constraints.txt ".[') or 1
        for package in packages:
            assert text.count(f"COPY {package} ./{package}\n") == builds, (path, package)
