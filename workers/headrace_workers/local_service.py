"""`LocalService`: the whole service on this machine, a server, a worker and a gateway, behind one Ctrl-C."""

import contextlib
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
    """Another program listens where the gateway is to listen."""


@dataclass(slots=True)
class LocalService:
    """Args:
    model: its folder or hub name, whose last part is the served name.
    redis_url: of a server that runs already; None starts an embedded one.
    progress: told each stage in a sentence.
    keys: the gateway's key file.
    """

    model: str
    progress: Callable[[str], None]
    redis_url: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    keys: str | None = None

    @contextmanager
    def running(self) -> Iterator["RunningService"]:
        """Start everything and yield when it serves; leaving the context ends everything that was started.

        Raises HeadraceWorkerError or HeadraceBrokerError where anything does not start.
        """
        _check_free(self.host, self.port)
        with contextlib.ExitStack() as stack:
            name = Path(self.model).name
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-serve-")))
            url = (
                self.redis_url or stack.enter_context(EmbeddedServer(environ={"PATH": os.environ.get("PATH", "")})).url
            )
            self.progress(f"queue: {BrokerSettings(redis_url=url).safe_url}")
            worker = stack.enter_context(
                LocalWorker(
                    model=self.model, redis_url=url, log=folder / "worker.log", served_model_name=name, grace_seconds=5
                )
            )
            settings = {} if self.keys is None else {"keys": self.keys}
            gateway = stack.enter_context(
                LocalGateway(redis_url=url, log=folder / "gateway.log", host=self.host, port=self.port, **settings)
            )
            self.progress(f"worker: process {worker.pid} is loading {name}")
            gateway.wait_ready()
            worker.wait_ready()
            yield RunningService(gateway.url, name, worker, gateway)


@dataclass(frozen=True, slots=True)
class RunningService:
    """What was started."""

    url: str
    model: str
    worker: LocalWorker
    gateway: LocalGateway

    def watch(self) -> None:
        """Return never; raises ProcessStartError when the worker or the gateway has ended."""
        while True:
            self.worker.check_alive()
            self.gateway.check_alive()
            time.sleep(_WATCH_SECONDS)


def _check_free(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PortTakenError(f"cannot listen on {host} port {port} ({error.strerror}): choose --port") from error
