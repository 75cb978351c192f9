"""`headrace doctor` on real servers and folders that are set up wrongly: it names what is wrong, and what to do."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headrace_broker.server.connections import connect
from headrace_broker.server.embedded import EmbeddedServer, free_port
from headrace_cli.commands.doctor import doctor
from headrace_cli.doctor.redis_checks import check_version
from headrace_cli.doctor.role_checks import ROLES
from service.clock_skew import ClockSkew
from service.redis_users import ServerWithUsers, url_of, users
from service.servers import OLDEST_PROGRAMS, make_server
from service.workers.conftest import model_folder

__all__ = ["model_folder"]

HEADRACE = [sys.executable, "-c", "from headrace_cli.main import main; main()"]


def report(url: str, *arguments: str, **environ: str) -> dict[str, Any]:
    """Return what `headrace doctor --json` prints, as statuses by check."""
    answer = CliRunner().invoke(doctor, ["--redis-url", url, "--json", *arguments], env=environ)
    return parsed(answer.stdout, answer.exit_code)


def parsed(output: str, exit_code: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output)
    assert found["ok"] == (exit_code == 0)
    for finding in found["findings"]:
        assert bool(finding["remedy"]) == (finding["status"] != "ok"), finding
        assert finding["text"].endswith(".")
    return found


def named(found: dict[str, Any], status: str = "failed") -> dict[str, str]:
    """Return the sentences of one status by check."""
    return {each["check"]: each["text"] for each in found["findings"] if each["status"] == status}


@pytest.fixture(scope="module")
def safe_server() -> Iterator[EmbeddedServer]:
    with make_server(appendonly=True) as server:
        yield server


@pytest.fixture(scope="module")
def server_with_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerWithUsers]:
    with ServerWithUsers(tmp_path_factory.mktemp("acl")) as server:
        yield server


@pytest.fixture
def port() -> str:
    return str(free_port())


def test_a_good_set_up_has_no_problem(safe_server: EmbeddedServer, model_folder: str, port: str) -> None:
    found = report(safe_server.url, "--model", model_folder, HEADRACE_METRICS_PORT=port)
    assert named(found) == named(found, "warning") == {}
    checked = {finding["check"] for finding in found["findings"]}
    assert {"redis", "redis-rights", "clock", "processor", "compiler", "gpu", "model", "disk", "port"} <= checked


def test_people_get_a_table_and_what_to_do(port: str) -> None:
    answer = CliRunner().invoke(
        doctor, ["--redis-url", f"redis://127.0.0.1:{port}/0", "--role", "producer"], env={"COLUMNS": "400"}
    )
    assert "-> start a server" in answer.output
    assert "1 failed, 0 warnings, 0 ok" in answer.output


@pytest.mark.parametrize("role", sorted(ROLES))
def test_the_shipped_user_of_each_role_has_its_rights_and_nothing_is_changed(
    server_with_users: ServerWithUsers, role: str, port: str
) -> None:
    ports = {"HEADRACE_GATEWAY_PORT": port, "HEADRACE_EXPORTER_PORT": port, "HEADRACE_METRICS_PORT": port}
    found = report(url_of(server_with_users, role), **ports)  # the role is that of the URL's user
    assert named(found) == {}
    text = named(found, "ok")["redis-rights"]
    assert text == f"User {role} has the rights of the role {role}."
    with connect(server_with_users.url) as admin:
        assert admin.dbsize() == 0


@pytest.mark.parametrize(
    ("role", "lost", "command"),
    [
        ("worker", "-xadd", "XADD headrace:stream:doctor"),
        ("worker", "resetkeys ~headrace:* ~celery* ~_kombu.*", "LPUSH headrace.doctor"),
        ("exporter", "-zcount", "ZCOUNT headracedoctor"),
        ("producer", "(%W~headrace.* +lpush +llen +exists)", "LPUSH headrace.doctor"),
        ("gateway", "(~headrace:tokenizer:answer:* +blpop)", "BLPOP headrace:tokenizer:answer:doctor"),
        ("client", "+subscribe", "SUBSCRIBE celery-task-meta-doctor"),
    ],
)
def test_a_user_without_a_right_is_named_with_the_command_and_the_key(
    server_with_users: ServerWithUsers, role: str, lost: str, command: str, port: str
) -> None:
    rules = " ".join(users()[role])
    changed = rules.replace(lost, "") if lost in rules else f"{rules} {lost}"
    with connect(server_with_users.url) as admin:
        admin.execute_command("ACL", "SETUSER", "limited", "reset", *_words(changed))  # type: ignore[no-untyped-call]
    url = url_of(server_with_users, "limited")
    ports = {"HEADRACE_GATEWAY_PORT": port, "HEADRACE_EXPORTER_PORT": port, "HEADRACE_METRICS_PORT": port}
    problem = named(report(url, "--role", role, **ports))
    assert problem.keys() == {"redis-rights"}
    assert f"User limited may not run {command}" in problem["redis-rights"]


def _words(rules: str) -> list[str]:
    """Split rules at spaces outside of parentheses: a selector is one argument of ACL SETUSER."""
    words: list[str] = []
    for word in rules.split():
        if words and words[-1].startswith("(") and not words[-1].endswith(")"):
            words[-1] += f" {word}"
        else:
            words.append(word)
    return words


def test_a_wrong_password_is_named(server_with_users: ServerWithUsers) -> None:
    url = url_of(server_with_users, "producer").replace("secret", "wrong")
    found = report(url)
    assert "refuses the user or its password" in named(found)["redis"]
    assert "wrong" not in json.dumps(found).replace("WRONGPASS", "")


def test_a_server_that_does_not_answer_is_named(port: str) -> None:
    found = report(f"redis://127.0.0.1:{port}/0", "--role", "producer")
    assert "cannot be reached" in named(found)["redis"]


def test_an_invalid_url_is_named() -> None:
    assert "redis_url must look like" in named(report("http://x"))["settings"]


def test_a_server_without_an_append_only_file_is_named() -> None:
    with make_server() as server:
        found = report(server.url, "--role", "producer")
    assert "writes no append-only file" in named(found, "warning")["redis-persistence"]


def test_a_server_that_evicts_keys_is_named() -> None:
    with make_server(appendonly=True, arguments=["--maxmemory-policy", "allkeys-lru"]) as server:
        found = report(server.url, "--role", "producer")
    assert "maxmemory-policy allkeys-lru" in named(found)["redis-memory"]


def test_a_server_whose_memory_is_full_is_named() -> None:
    with make_server(appendonly=True, arguments=["--maxmemory", "1mb"]) as server:
        found = report(server.url, "--role", "producer")
    assert "of 1 MiB of memory, and refuses writes" in named(found)["redis-memory"]
    assert "redis-rights" not in named(found)  # a full server does not look like a missing right


def test_a_read_only_replica_is_named(safe_server: EmbeddedServer) -> None:
    replica = make_server(appendonly=True, arguments=["--replicaof", f"127.0.0.1 {safe_server.port}"])
    with replica as server:
        found = report(server.url, "--role", "producer")
    assert named(found).keys() == {"redis-replication"}
    assert f"read-only replica of 127.0.0.1:{safe_server.port}" in named(found)["redis-replication"]


@pytest.mark.parametrize("program", OLDEST_PROGRAMS)
def test_a_server_that_would_not_load_its_append_only_file_is_named(tmp_path: Path, program: str) -> None:
    with ServerWithUsers(tmp_path, program=program, default="off -@all") as server:
        found = report(url_of(server, "worker"), "--role", "exporter", HEADRACE_EXPORTER_PORT="0")
    assert "would lose transactions and scripts' writes at its next restart" in named(found)["redis-restart"]


def test_a_server_that_is_too_old_is_named() -> None:
    old = check_version({"redis_version": "6.2.14"})
    assert (old.status, old.text) == ("failed", "The server is Redis 6.2.14, and 7.0 is the oldest that is supported.")
    assert check_version({"redis_version": "7.0.0"}).status == "ok"
    assert check_version({"redis_version": "7.2.4", "valkey_version": "8.1.1"}).text == "The server is Valkey 8.1.1."


def test_a_clock_that_is_wrong_is_named(safe_server: EmbeddedServer, tmp_path: Path) -> None:
    command = [*HEADRACE, "doctor", "--json", "--role", "producer", "--redis-url", safe_server.url]
    skewed = {**os.environ, **ClockSkew(tmp_path).environ(hours=-2)}
    done = subprocess.run(command, env=skewed, capture_output=True, text=True, check=False)
    text = named(parsed(done.stdout, done.returncode))["clock"]
    assert "s behind that of Redis's machine" in text
    assert "7200" in text or "7199" in text


def test_a_port_that_is_taken_is_named(safe_server: EmbeddedServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = report(safe_server.url, "--role", "gateway", HEADRACE_GATEWAY_PORT=str(port))
    assert f"nothing more can listen on 127.0.0.1 port {port}" in named(found)["port"]


def test_a_disk_that_is_full_is_named(safe_server: EmbeddedServer, tmp_path: Path) -> None:
    mounted = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec"]
    script = f'mount -t tmpfs -o size=64k none {tmp_path}; test $# = 0 || exec "$@"'
    if shutil.which("unshare") is None or subprocess.run([*mounted, script], check=False).returncode:
        pytest.skip("this user may not mount a small disk")
    command = [*HEADRACE, "doctor", "--json", "--role", "gateway", "--redis-url", safe_server.url]
    environ = {**os.environ, "HEADRACE_GATEWAY_FILES": str(tmp_path), "HEADRACE_GATEWAY_PORT": "0"}
    done = subprocess.run([*mounted, script, "-", *command], env=environ, capture_output=True, text=True, check=False)
    problem = named(parsed(done.stdout, done.returncode))["disk"]
    assert problem == f"{tmp_path}, for uploads and batches, cannot be written: No space left on device."


def test_a_machine_without_a_compiler_is_named(safe_server: EmbeddedServer, model_folder: str, port: str) -> None:
    found = report(safe_server.url, "--model", model_folder, HEADRACE_METRICS_PORT=port, CC="no-such-compiler")
    assert "There is no C compiler" in named(found)["compiler"]


def test_precompiled_kernels_make_a_compiler_unnecessary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace_cli.doctor.worker_checks import check_kernels  # imports torch
    from headrace_engine.runner.native import precompiled
    from headrace_engine.runner.native.kernel_source import source_text

    for variant in precompiled.VARIANTS:
        (tmp_path / variant.name).mkdir()
    monkeypatch.setattr(precompiled, "LIBRARIES", tmp_path)
    monkeypatch.setenv("CC", "no-such-compiler")
    best = precompiled.best_variant()
    if best is None:
        pytest.skip("no variant runs on this processor")
    assert check_kernels().status == "failed"  # the libraries of another version are no help
    source = source_text("headrace_engine.runner.linear", "linear.c")
    (tmp_path / best.name / precompiled.library_name("linear.c", source)).touch()
    found = check_kernels()
    assert found.status == "ok"
    assert (
        f"There is no C compiler (tried $CC, then cc). The precompiled kernels of {best.name} are used." == found.text
    )


def test_a_compiler_without_headers_is_named(
    safe_server: EmbeddedServer, model_folder: str, port: str, tmp_path: Path
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\necho "fatal error: omp.h: No such file or directory" >&2\nexit 1\n')
    compiler.chmod(0o700)
    found = report(safe_server.url, "--model", model_folder, HEADRACE_METRICS_PORT=port, CC=str(compiler))
    assert "omp.h: No such file" in named(found)["compiler"]


def test_a_gpu_that_is_not_there_is_named(safe_server: EmbeddedServer, model_folder: str, port: str) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    found = report(safe_server.url, "--model", model_folder, HEADRACE_METRICS_PORT=port, HEADRACE_DEVICE="cuda")
    assert "device cuda was asked for" in named(found)["gpu"]


def missing(folder: Path) -> str:
    shutil.rmtree(folder)
    return "there is no such folder"


def truncated(folder: Path) -> str:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1000])
    return f"model.safetensors has {len(whole) - 1000} bytes and should have {len(whole)}"


def without_header(folder: Path) -> str:
    (folder / "model.safetensors").write_bytes(b"<html>not found</html>")
    return "model.safetensors has no readable header"


def without_a_part(folder: Path) -> str:
    index = {"weight_map": {"a": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return "model-00002-of-00002.safetensors is missing"


def without_weights(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    return "has no *.safetensors"


def too_large(folder: Path) -> str:
    size = 1 << 42
    tensor = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    header = json.dumps({"huge": tensor}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)  # a hole: it takes no disk
    return "GiB of memory are free"


@pytest.mark.parametrize("spoil", [missing, truncated, without_header, without_a_part, without_weights, too_large])
def test_a_model_that_cannot_be_served_is_named(
    safe_server: EmbeddedServer, model_folder: str, port: str, tmp_path: Path, spoil: Any
) -> None:
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    reason = spoil(folder)
    found = report(safe_server.url, "--model", str(folder), HEADRACE_METRICS_PORT=port)
    assert reason in named(found)["model"]
    assert named(found).keys() == {"model"}


def test_each_server_of_the_queue_urls_is_checked_and_named(safe_server: EmbeddedServer) -> None:
    with make_server(appendonly=True) as second:
        where = second.url.rpartition("@")[2].removeprefix("redis://")
        urls = ",".join(f"{model}=redis://:secret@{where}" for model in ("a", "b"))
        with connect(second.url) as client:
            client.config_set("requirepass", "secret")
            client.auth("secret")
            client.config_set("maxmemory-policy", "allkeys-lru")
        found = report(safe_server.url, "--role", "producer", HEADRACE_QUEUE_URLS=urls)
        assert named(found)["redis-memory"].startswith(f"redis://{where}: ")
        second.stop()
        found = report(safe_server.url, "--role", "producer", HEADRACE_QUEUE_URLS=urls)
        assert named(found).keys() == {"redis"}
        assert named(found)["redis"].startswith(f"Redis at redis://{where} cannot be reached")
        assert [finding["check"] for finding in found["findings"]].count("redis") == 2
        assert "HEADRACE_QUEUE_URLS" in str(found)
        assert "secret" not in str(found)
