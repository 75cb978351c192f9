"""`LocalService`: the whole service on this machine: a Redis server, a worker and a gateway."""

import contextlib
import math
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.settings import BrokerSettings
from headrace_cli.errors import PortTakenError
from headrace_cli.local.process import LocalGateway, LocalWorker

_WATCH_SECONDS = 0.5


@dataclass(slots=True)
class LocalService:
    """Args:
    model: model folder or hub name; its last part is the served name.
    redis_url: URL of a running server; None starts an embedded one.
    progress: called with one sentence for each stage.
    keys: the gateway's key file.
    files: the gateway's directory of uploads and batches.
    """

    model: str
    progress: Callable[[str], None]
    redis_url: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    keys: str | None = None
    files: Path | None = None

    @contextmanager
    def running(self) -> Iterator["RunningService"]:
        """Start everything, and yield when it is ready. Leaving the context ends everything that was started.

        Raises HeadraceCommandError or HeadraceBrokerError if a part does not start.
        """
        with contextlib.ExitStack() as stack:
            name = Path(self.model).resolve().name
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-serve-")))
            server, url = None, self.redis_url
            if url is None:
                server = stack.enter_context(EmbeddedServer(environ={"PATH": os.environ.get("PATH", os.defpath)}))
                url = server.url
            self.progress(f"queue: {BrokerSettings(redis_url=url).safe_url}")
            worker = stack.enter_context(
                LocalWorker(
                    model=self.model, redis_url=url, log=folder / "worker.log", served_model_name=name, grace_seconds=5
                )
            )
            given = {"keys": self.keys, "files": self.files}
            settings = {name: value for name, value in given.items() if value is not None}
            gateway = stack.enter_context(
                LocalGateway(
                    redis_url=url, log=folder / "gateway.log", host=self.host, port=self.port, shutdown=2, **settings
                )
            )
            running = RunningService(gateway.url, url, name, worker, gateway, server)
            self.progress(f"worker: process {worker.pid} is loading {name}")
            self._wait_ready(running)
            yield running

    def _wait_ready(self, running: "RunningService") -> None:
        """Wait without a limit, because fetching a model may take long; report each new reason."""
        reported = None
        for process in (running.worker, running.gateway):  # a gateway is ready once a model is registered
            for reason in process.readiness(math.inf):
                running.check_alive()
                if reason not in (None, reported):
                    self.progress(f"waiting: {reason}")
                    reported = reason


@dataclass(frozen=True, slots=True)
class RunningService:
    """The processes that `LocalService` started."""

    url: str
    redis_url: str
    model: str
    worker: LocalWorker
    gateway: LocalGateway
    server: EmbeddedServer | None
    """None if `redis_url` was given."""

    def watch(self) -> None:
        """Block until a process ends, then raise its error."""
        while True:
            self.check_alive()
            time.sleep(_WATCH_SECONDS)

    def check_alive(self) -> None:
        """Raise ProcessStartError or EmbeddedServerError if a process has ended."""
        for process in (self.server, self.worker, self.gateway):
            if process is not None:
                process.check_alive()


def check_free(host: str, port: int) -> None:
    """Raise PortTakenError if this process could not listen on the port now."""
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        raise PortTakenError(
            f"cannot listen on {host} port {port} ({error.strerror}): choose --host or --port"
        ) from error
