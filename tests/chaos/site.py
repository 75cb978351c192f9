"""`Site`: a server as docker-compose.yml has it, workers that reach it each over a network of its own, and gateways.

Each process connects as its own user of deploy/redis/users.acl.
"""

import random
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from celery import Celery
from celery.result import AsyncResult

from chaos import poison
from chaos.http_reader import HttpReader
from chaos.proxy import Proxy
from headrace_broker.keys import result_key, stream_key
from service.clock_skew import ClockSkew
from service.gateway.gateway_process import GatewayProcess
from service.redis_users import ServerWithUsers, url_at, url_of
from service.servers import PROGRAM
from service.workers.service import Service
from service.workers.worker_process import WorkerProcess

READY_SECONDS = 300.0
_CLOCK_HOURS = (3, -3)
"""How far the workers' clocks are ahead."""
_PUBLISH_INTERVAL = (0, 0.02)
"""One worker publishes each step, the other gathers tokens; either may have to continue where the other one stopped."""


@dataclass(frozen=True)
class Doomed:
    """A request of a fault that is not to end by itself."""

    handle: AsyncResult
    kind: int | None
    """Number of the request of the load that it is; None for the poison."""
    code: str
    """Of the error that ends it."""


class Post:
    """A place for a worker. A worker that dies is replaced by another one."""

    def __init__(self, service: Service, proxy: Proxy, **settings: object) -> None:
        self._service = service
        self._settings = settings
        self.proxy = proxy
        self.num_starts = 0
        self.start()

    def start(self) -> None:
        self.num_starts += 1
        self.worker: WorkerProcess = self._service.start_worker(
            redis_url=url_at(self.proxy.port, "worker"), **self._settings
        )

    @property
    def is_ready(self) -> bool:
        text = self.worker.log_text()
        return "metrics on http://" in text and self.worker.health("ready")[0] == 200


class Site:
    """A context manager that holds the whole service on loopback. The workers' clocks disagree by hours.

    Args:
        folder: for the workers' logs; it stays.
        program: the server.
        engine_settings: of the workers, by name, beside those of the harness.
        environ: other environment variables of the workers. By default, engines obey `poison`.
    """

    lease_seconds = 2.0
    slots = 32
    """Choices that a worker runs at once."""

    def __init__(
        self,
        model: str,
        folder: Path,
        num_workers: int = 2,
        engine_settings: Mapping[str, object] | None = None,
        gateway_settings: Mapping[str, object] | None = None,
        program: str = PROGRAM,
        environ: Mapping[str, str] | None = None,
        num_gateways: int = 2,
    ) -> None:
        self.server = ServerWithUsers(folder, program=_without_file_size_signal(folder, program))
        self.server.start()
        self.service = Service(self.server, model, folder, sender_url=self.url_of("client"))
        self.client = self.service.client
        self.operator = Celery(broker=self.url_of("operator"), set_as_current=False)
        # a revoked message that no worker holds gets its result in the serializer of the command
        self.operator.conf.task_serializer = "msgpack"
        self._ended: list[str] = []
        settings = {
            "lease_seconds": self.lease_seconds,
            "grace_seconds": 0.3,
            "delivery_limit": 1000,
            "max_num_seqs": self.slots,
        }
        skew = ClockSkew(folder)
        environ = poison.environ(folder / "poison") if environ is None else dict(environ)
        self.posts = [
            Post(
                self.service,
                Proxy(self.server.port),
                environ=skew.environ(_CLOCK_HOURS[number % 2]) | environ,
                publish_interval=_PUBLISH_INTERVAL[number % 2],
                **settings,
                **(engine_settings or {}),
            )
            for number in range(num_workers)
        ]
        self.gateways = [
            GatewayProcess(
                redis_url=self.url_of("gateway"), log=folder / f"gateway-{number}.log", **(gateway_settings or {})
            )
            for number in range(num_gateways)
        ]
        self.readers: list[HttpReader] = []
        """Those of the round that runs."""
        self.doomed: list[Doomed] = []
        """The same."""

    def url_of(self, user: str) -> str:
        """The server's URL for one of its users."""
        return url_of(self.server, user)

    @property
    def gateway_ports(self) -> list[int]:
        return [gateway.port for gateway in self.gateways]

    def wait_ready(self) -> None:
        """Wait until every worker and every gateway serves."""
        deadline = time.monotonic() + READY_SECONDS
        for gateway in self.gateways:
            gateway.wait_ready()
        while not all(post.is_ready for post in self.posts):
            self.revive()
            assert time.monotonic() < deadline, f"not every worker is ready:\n{self.service.logs()}"
            time.sleep(0.05)

    def wait_any_ready(self) -> None:
        """Wait until one worker serves."""
        deadline = time.monotonic() + READY_SECONDS
        while not any(post.is_ready for post in self.posts):
            self.revive()
            assert time.monotonic() < deadline, f"no worker is ready:\n{self.service.logs()}"
            time.sleep(0.02)

    def fill_disk(self) -> None:
        """The server's files grow no more."""
        size = max(file.stat().st_size for file in self.server.folder.rglob("*.aof"))
        self._limit_files(size)

    def empty_disk(self) -> None:
        """They may grow again."""
        self._limit_files(resource.RLIM_INFINITY)

    def _limit_files(self, size: int) -> None:
        assert self.server.pid is not None
        _, hard = resource.prlimit(self.server.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.server.pid, resource.RLIMIT_FSIZE, (size, hard))

    def send_doomed(self, body: Any, kind: int | None, code: str, **options: Any) -> AsyncResult:
        """Send a request that is to end with the error `code`."""
        handle = self.service.send(body, **options)
        self.doomed.append(Doomed(handle, kind, code))
        return handle

    def any_post(self, draw: random.Random) -> Post:
        return draw.choice(self.posts)

    def revive(self) -> None:
        """Start each worker again that ended by itself, as a supervisor such as systemd does, and note its log."""
        for post in self.posts:
            if post.worker.process.poll() is not None:
                self._ended.append(str(post.worker.log))
                post.start()
        for gateway in self.gateways:
            if gateway.process.poll() is not None:
                self._ended.append(str(gateway.log))
                gateway.start()

    def take_ended(self) -> list[str]:
        """The logs of the workers and gateways that ended by themselves since the last call."""
        self.revive()
        ended, self._ended = self._ended, []
        return ended

    def take_refusals(self) -> list[str]:
        """What the server refused to its users since the last call, and while it last loaded its append-only file."""
        refused = self.client.acl_log()
        self.client.acl_log_reset()
        problems = [f"the user {each['username']} was refused {each['object']}: {each['context']}" for each in refused]
        if dropped := self.client.info("stats")["unexpected_error_replies"]:
            problems.append(f"{dropped} errors while the server loaded its append-only file")
        return problems

    def forget(self, handles: Sequence[AsyncResult]) -> None:
        """Long runs must not grow: neither this process nor the server keeps what is checked."""
        for handle in handles:
            handle.backend.remove_pending_result(handle)
            self.client.delete(result_key(handle.id), stream_key(handle.id))
            handle.backend = None
        self.service.forget()

    def close(self) -> None:
        for gateway in self.gateways:
            gateway.close()
        for post in self.posts:
            post.proxy.heal()
        self.service.close()
        self.operator.close()
        for post in self.posts:
            post.proxy.close()
        self.server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _without_file_size_signal(folder: Path, program: str) -> str:
    """The server behind a script that keeps it alive where a file may not grow: the write fails, as on a full disk."""
    script = folder / "server"
    script.write_text(f"#!/bin/sh\ntrap '' XFSZ\nexec {program} \"$@\"\n")
    script.chmod(0o700)
    return str(script)
