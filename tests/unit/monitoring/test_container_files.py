"""docker-compose.yml and the Dockerfile, as far as they can be checked without a container engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace_gateway.settings import GATEWAY_PREFIX, GatewaySettings
from headrace_wire.environment import variable_of
from headrace_wire.option import options_of
from headrace_workers.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[3]
OURS = (ROOT / "Dockerfile", ROOT / "deploy" / "cuda" / "Dockerfile")
VLLM = ROOT / "deploy" / "vllm" / "Dockerfile"
DOCKERFILES = (*OURS, VLLM, ROOT / "deploy" / "neuron" / "Dockerfile")


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
    for dockerfile in (*OURS, VLLM):
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
    assert "redis-data:/data" in services["redis"]["volumes"]


def test_the_redis_users_of_the_compose_file_are_those_of_the_file_for_other_installations(
    services: dict[str, Any],
) -> None:
    users = (ROOT / "deploy" / "redis" / "users.acl").read_text(encoding="utf-8")
    assert re.sub(r":\?[^}]*\}", "}", services["redis"]["environment"]["REDIS_USERS"]) == users


def test_redis_gets_its_users_through_its_environment_so_that_a_change_makes_a_new_container(
    services: dict[str, Any], tmp_path: Path
) -> None:
    shell, flag, script, *arguments = [word.replace("$$", "$") for word in services["redis"]["command"]]
    file = arguments[arguments.index("--aclfile") + 1]
    assert str(Path(file).parent) in services["redis"]["tmpfs"]
    server = tmp_path / "valkey-server"
    server.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"; env\n", encoding="utf-8")
    server.chmod(0o755)
    here = script.replace(file, str(tmp_path / "users.acl"))
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "REDIS_USERS": "user a on >100%s\nuser b off\n"}
    done = subprocess.run([shell, flag, here, *arguments], env=environment, capture_output=True, text=True, check=True)
    assert (tmp_path / "users.acl").read_text(encoding="utf-8") == environment["REDIS_USERS"]
    assert stat.S_IMODE((tmp_path / "users.acl").stat().st_mode) == 0o600
    assert done.stdout.splitlines()[: len(arguments) - 1] == arguments[1:]
    assert "REDIS_USERS" not in done.stdout  # what /proc shows of the server


def test_redis_and_the_metrics_are_not_published(services: dict[str, Any]) -> None:
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert published == {
        "grafana": ["127.0.0.1:3000:3000"],
        "gateway": ["127.0.0.1:${HEADRACE_GATEWAY_PORT:-8000}:8000"],
    }
    assert list(services["redis"]["networks"]) == list(services["worker"]["networks"]) == ["backend"]


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
    assert "/keys/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


def test_the_environment_of_the_gateway_are_options_that_it_has(services: dict[str, Any]) -> None:
    known = {"HEADRACE_REDIS_URL", "HEADRACE_QUEUE_URLS", "HEADRACE_STREAM_URLS"} | {
        variable_of(option, GATEWAY_PREFIX) for option in options_of(GatewaySettings)
    }
    image = re.findall(r"(HEADRACE_GATEWAY_\w+)=", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    assert len(image) == 4
    assert {*services["gateway"]["environment"], *image} <= known


def test_no_password_has_a_default_and_those_of_make_env_are_secret_and_stay(tmp_path: Path) -> None:
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    passwords = set(re.findall(r"\$\{(\w+_PASSWORD)(:?\??)", text))
    assert {after for _, after in passwords} == {":?"}  # without it nothing starts
    script = tmp_path / "deploy" / "compose" / "make-env"
    script.parent.mkdir(parents=True)
    shutil.copy(ROOT / "deploy" / "compose" / "make-env", script)
    subprocess.run([script], umask=0o022, check=True)
    file = tmp_path / ".env"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o755  # user 10001 reads it
    fresh = dict(line.split("=") for line in file.read_text(encoding="utf-8").splitlines())
    assert set(fresh) == {name for name, _ in passwords}
    assert all(re.fullmatch(r"[0-9a-f]{48}", password) for password in fresh.values())
    assert len(set(fresh.values())) == len(fresh)
    # again, as after an upgrade with one more user: what is there is kept
    older = "REDIS_ADMIN_PASSWORD=mine\nHEADRACE_SERVED_MODEL_NAME=tiny\n"
    file.write_text(older, encoding="utf-8")
    file.chmod(0o644)
    subprocess.run([script], cwd=tmp_path, check=True)
    text = file.read_text(encoding="utf-8")
    assert text.startswith(older)
    assert text.count("_PASSWORD=") == len(fresh)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_documented_order_makes_passwords_and_keys_before_anything_starts() -> None:
    text = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    steps = [
        "make-env",
        "HEADRACE_MODEL_DIR=",
        "compose build",
        "gateway-key website >> keys/keys.toml",
        "compose up -d",
    ]
    places = [text.index(step) for step in steps]
    assert places == sorted(places)


def test_secrets_are_given_to_neither_git_nor_the_builder() -> None:
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {".env", "/keys/"} <= set(ignored)
    given = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in given
    assert not {"!.env", "!keys"} & set(given)


def test_every_service_runs_without_privileges_and_cannot_fill_the_disk_with_logs(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert {"max-size", "max-file"} <= service["logging"]["options"].keys(), name
        assert service["restart"] == "unless-stopped", name
    assert services["redis"]["user"] == "valkey"  # root without capabilities could not change to it


def test_compiled_kernels_outlive_a_container(services: dict[str, Any]) -> None:
    for name, path in zip(("worker", "worker-gpu"), OURS, strict=True):
        folder = re.search(r"XDG_CACHE_HOME=(\S+)", path.read_text(encoding="utf-8"))
        assert folder is not None
        assert f"worker-cache:{folder[1]}" in services[name]["volumes"]
        assert f"mkdir --mode 0700 {folder[1]} && chown 10001:10001 {folder[1]}" in path.read_text(encoding="utf-8")


def test_what_holds_no_model_has_the_image_without_torch(services: dict[str, Any]) -> None:
    assert services["exporter"]["build"] == services["gateway"]["build"] == {"context": ".", "target": "gateway"}
    assert services["exporter"]["entrypoint"] == ["headrace", "exporter"]


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
    assert vllm["build"] == {"context": ".", "dockerfile": "deploy/vllm/Dockerfile"}
    (gpus,) = vllm["deploy"]["resources"]["reservations"]["devices"]
    assert gpus == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert f"vllm-compile-cache:{vllm['environment']['VLLM_CACHE_ROOT']}" in vllm["volumes"]
    assert vllm["volumes"][0] == cpu["volumes"][0]
    owner = f"chown 10001:10001 {vllm['environment']['VLLM_CACHE_ROOT']}"
    assert owner in VLLM.read_text(encoding="utf-8")  # or it could not write there


@pytest.mark.parametrize("service", ["worker", "worker-gpu", "worker-vllm", "worker-neuron"])
def test_the_environment_of_a_worker_are_options_that_its_engine_has(
    services: dict[str, Any], service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = VLLM.read_text(encoding="utf-8") if service == "worker-vllm" else ""
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
    assert scraped == {("workers", 9464), ("exporter", 9465), ("gateway", 9466), ("neuron-monitor", 8000)}
    for name in (name for name in services if name.startswith("worker")):
        assert services[name]["networks"]["backend"] == {"aliases": ["workers"]}, name


def test_prometheus_seldom_asks_for_a_service_that_may_be_absent(services: dict[str, Any]) -> None:
    config = yaml.safe_load((ROOT / "monitoring" / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    optional = {name for name, service in services.items() if "profiles" in service}
    intervals = {
        name: found["refresh_interval"]
        for scrape in config["scrape_configs"]
        for found in scrape["dns_sd_configs"]
        for name in found["names"]
    }
    assert {name: interval for name, interval in intervals.items() if name in optional} == {"neuron-monitor": "5m"}


def test_an_image_runs_without_privileges_as_a_user_and_a_group_that_have_names() -> None:
    for path in DOCKERFILES:
        dockerfile = path.read_text(encoding="utf-8")
        final = dockerfile.rpartition("\nFROM ")[2]
        assert "\nUSER 10001:10001\n" in final or path.parent.name == "neuron", path
        assert dockerfile.rstrip().endswith('ENTRYPOINT ["headrace", "worker"]'), path  # of the last stage, the default
        # Celery warns at every start of a group that has no name
        users = dockerfile.count("useradd --system --uid 10001 --gid 10001 --no-create-home headrace")
        groups = dockerfile.count("groupadd --system --gid 10001 headrace")
        assert users == groups == dockerfile.count("useradd"), path


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)
def test_a_dockerfile_has_nothing_that_hadolint_minds(path: Path) -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed (make ops-tools)")
    done = subprocess.run([hadolint, "--no-color", str(path)], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", [*OURS, VLLM], ids=lambda path: path.parent.name)
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
        assert answers.returncode == 1  # no server runs there
        assert b"Connection refused" in answers.stderr


def stages(dockerfile: Path) -> dict[str, str]:
    """The text of each named stage, without comments."""
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(re.findall(r"^FROM \S+ AS ([\w-]+)\n(.*?)(?=^FROM )", text, re.M | re.S))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)
def test_every_stage_that_builds_our_wheel_has_the_files_that_pyproject_names(path: Path) -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project, wheel = pyproject["project"], pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]
    named = {project["readme"], *project["license-files"], *(hook["path"] for hook in wheel["hooks"].values())}
    building = [stage for stage in path.read_text(encoding="utf-8").split("\nFROM ") if '".[' in stage]
    assert building
    for stage in building:
        copied = [line.split()[1:] for line in stage.splitlines() if line.startswith("COPY ")]
        assert {str(Path(target) / Path(name).name) for *names, target in copied for name in names} >= named


def test_the_image_of_the_gateway_has_no_torch_and_no_compiler() -> None:
    found = stages(ROOT / "Dockerfile")
    assert '".[gateway]"' in found["gateway-build"]
    assert "torch" not in found["gateway-build"] + found["gateway"]
    assert "apt-get" not in found["gateway"]
    assert "COPY --from=gateway-build " in found["gateway"]
    assert "USER 10001:10001" in found["gateway"]
    assert found["gateway"].rstrip().endswith('ENTRYPOINT ["headrace", "gateway"]')


def test_the_image_of_vllm_keeps_vllm_in_the_interpreter_of_its_own_image() -> None:
    text = VLLM.read_text(encoding="utf-8")
    # the environment is made with the interpreter that it runs with: the two stages have one base
    assert re.findall(r"^FROM (\S+)", text, re.MULTILINE) == ["${VLLM_IMAGE}"] * 2
    assert '".[vllm,tracing]"' in text
    assert "apt-get" not in text
    assert "COPY --from=build /opt/headrace /opt/headrace" in text
    assert "RUN /usr/bin/python3 -m venv /opt/headrace" in text
    assert "HEADRACE_ENGINE=vllm " in text
    assert "HEADRACE_ENGINE_PYTHON=/usr/bin/python3 " in text


def test_a_builder_that_builds_every_stage_pulls_no_other_base() -> None:
    bases = set(re.findall(r"^FROM (\S+)", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE))
    assert bases == {"${PYTHON_IMAGE}"}


def test_an_image_is_built_from_every_package_of_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {path.partition("/")[0] for path in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    for path in DOCKERFILES:
        text = path.read_text(encoding="utf-8")
        builds = text.count('pip install --constraint constraints.txt ".[') or 1
        for package in packages:
            assert text.count(f"COPY {package} ./{package}\n") == builds, (path, package)
