"""`LocalService`: the whole service on this machine, a server, a worker and a gateway, behind one Ctrl-C."""

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

from headrace_broker.embedded import EmbeddedServer
from headrace_broker.settings import BrokerSettings
from headrace_workers.errors import HeadraceWorkerError
from headrace_workers.local_gateway import LocalGateway
from headrace_workers.local_worker import LocalWorker

_WATCH_SECONDS = 0.5


class PortTakenError(HeadraceWorkerError):
    """The gateway cannot listen where it is to listen, often because another program does."""


@dataclass(slots=True)
class LocalService:
    """Args:
    model: its folder or hub name, whose last part is the served name.
    redis_url: of a server that runs already; None starts an embedded one.
    progress: told each stage in a sentence.
    keys: the gateway's key file.
    files: the gateway's folder of uploads and batches.
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
        """Start everything and yield when it serves; leaving the context ends everything that was started.

        Raises HeadraceWorkerError or HeadraceBrokerError where anything does not start.
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
            running = RunningService(gateway.url, name, worker, gateway, server)
            self.progress(f"worker: process {worker.pid} is loading {name}")
            self._wait_ready(running)
            yield running

    def _wait_ready(self, running: "RunningService") -> None:
        """Wait without a limit, since a model may take long to be fetched; tell each new reason."""
        told = None
        for process in (running.gateway, running.worker):
            for reason in process.readiness(math.inf):
                running.check_alive()
                if reason not in (None, told):
                    self.progress(f"waiting: {reason}")
                    told = reason


@dataclass(frozen=True, slots=True)
class RunningService:
    """What was started."""

    url: str
    model: str
    worker: LocalWorker
    gateway: LocalGateway
    server: EmbeddedServer | None
    """None where the Redis was there before."""

    def watch(self) -> None:
        """Return never; raises an error when one of its processes has ended."""
        while True:
            self.check_alive()
            time.sleep(_WATCH_SECONDS)

    def check_alive(self) -> None:
        """Raises ProcessStartError or EmbeddedServerError, which says what has ended."""
        if self.server is not None:
            self.server.check_alive()
        self.worker.check_alive()
        self.gateway.check_alive()


def check_free(host: str, port: int) -> None:
    """Raises PortTakenError where nobody could listen at the port now."""
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
