"""`Site`: a server as docker-compose.yml has it, workers that reach it each over a network of its own, and gateways.

Each process connects as its own user of deploy/redis/users.acl.
"""

import random
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import redis
from celery import Celery
from celery.result import AsyncResult

from chaos import poison
from chaos.http_reader import HttpReader
from chaos.load import Kind
from chaos.proxy import Proxy
from headrace_broker.keys import result_key, stream_key
from headrace_broker.server.connections import connect
from headrace_broker.server.stream_servers import StreamServers
from headrace_broker.server.stream_table import home_of
from headrace_broker.server.stream_table_editor import StreamTableEditor
from headrace_broker.settings import BrokerSettings
from service.clock_skew import ClockSkew
from service.gateway.gateway_process import GatewayProcess
from service.redis_users import ServerWithUsers, url_at, url_of
from service.servers import PROGRAM
from service.workers.service import Service, StreamLog
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

    def __init__(self, service: Service, proxy: Proxy, environ: Mapping[str, str], **settings: object) -> None:
        self._service = service
        self.environ = dict(environ)
        self._settings = settings
        self.proxy = proxy
        self.num_starts = 0
        self.started: dict[int, dict[str, str]] = {}
        """The environment of each worker by its process."""
        self.start()

    def start(self) -> None:
        self.num_starts += 1
        self.worker: WorkerProcess = self._service.start_worker(
            redis_url=url_at(self.proxy.port, "worker"), environ=self.environ, **self._settings
        )
        self.started[self.worker.process.pid] = self.environ

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
        num_stream_servers: servers of their own for the streams; 0: they are on the server of the queue.
    """

    lease_seconds = 2.0
    slots = 32
    """Choices that a worker runs at once."""
    has_ledger = True
    """Whether all workers count tokens in the ledger."""
    has_shared_keys = True
    """Whether each worker knows the requests that the others have seen."""

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
        num_stream_servers: int = 0,
    ) -> None:
        self.server = ServerWithUsers(folder, program=_without_file_size_signal(folder, program))
        self.server.start()
        self.service = Service(self.server, model, folder, sender_url=self.url_of("client"))
        self.client = self.service.client
        self.stream_servers = self._start_stream_servers(folder, program, num_stream_servers)
        self._stream_clients = {name: connect(url_of(each, "admin")) for name, each in self.stream_servers.items()}
        if self.stream_servers:
            self._enable_stream_servers()
        self.operator = Celery(broker=self.url_of("operator"), set_as_current=False)
        # a revoked message that no worker holds gets its result in the serializer of the command
        self.operator.conf.task_serializer = "msgpack"
        self._ended: list[str] = []
        settings = {
            "lease_seconds": self.lease_seconds,
            "grace_seconds": 0.3,
            "delivery_limit": 1000,
            "max_num_seqs": self.slots,
            "stream_urls": self.stream_urls_of("worker"),
        }
        skew = ClockSkew(folder)
        environ = poison.environ(folder / "poison") if environ is None else dict(environ)
        self.posts = [
            Post(
                self.service,
                Proxy(self.server.port),
                self.with_code(number, skew.environ(_CLOCK_HOURS[number % 2]) | environ),
                publish_interval=_PUBLISH_INTERVAL[number % 2],
                **settings,
                **(engine_settings or {}),
            )
            for number in range(num_workers)
        ]
        self.gateways = [
            GatewayProcess(
                redis_url=self.url_of("gateway"),
                log=folder / f"gateway-{number}.log",
                stream_urls=self.stream_urls_of("gateway"),
                environ=self.with_code(number, {}),
                **(gateway_settings or {}),
            )
            for number in range(num_gateways)
        ]
        self.readers: list[HttpReader] = []
        """Those of the round that runs."""
        self.doomed: list[Doomed] = []
        """The same."""
        self.emptied: set[str] = set()
        """Stream servers that lost their data in that round. Their streams are lost."""

    def with_code(self, number: int, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of a worker or gateway, perhaps with the path of other code than the working tree's."""
        return dict(environ)

    def send(self, kind: Kind, **options: Any) -> AsyncResult:
        """Send a request of the load."""
        return self.service.send(kind.body, **options)

    def check(self, request_id: str, log: StreamLog) -> None:
        """Check more of a request that has ended as it should. Raises AssertionError."""

    def url_of(self, user: str) -> str:
        """The server's URL for one of its users."""
        return url_of(self.server, user)

    def stream_urls_of(self, user: str) -> str:
        """The URLs of the stream servers for one of their users, as in HEADRACE_STREAM_URLS."""
        return ",".join(f"{name}={url_of(server, user)}" for name, server in self.stream_servers.items())

    def settings_of(self, user: str) -> BrokerSettings:
        return BrokerSettings(self.url_of(user), stream_urls=self.stream_urls_of(user))

    def home_of(self, request_id: str) -> str:
        """The name of the request's stream server; '' for the server of the queue."""
        return home_of(self.stream_servers, request_id)

    def url_of_stream(self, request_id: str, user: str) -> str:
        home = self.home_of(request_id)
        return url_of(self.stream_servers[home], user) if home else self.url_of(user)

    def _start_stream_servers(self, folder: Path, program: str, count: int) -> dict[str, ServerWithUsers]:
        servers = {}
        for number in range(count):
            own = folder / f"stream-server-{number + 1}"
            own.mkdir()
            servers[f"s{number + 1}"] = ServerWithUsers(own, program=_without_file_size_signal(own, program))
        for server in servers.values():
            server.start()
        return servers

    @contextmanager
    def _table_editor(self) -> Iterator[StreamTableEditor]:
        settings = self.settings_of("operator")
        with (
            connect(settings.redis_url) as operator,
            StreamServers.connected(operator, *settings.stream_servers) as servers,
        ):
            yield StreamTableEditor(servers)

    def _enable_stream_servers(self) -> None:
        with self._table_editor() as editor:
            editor.enable()
        self.service.stream_server_of = lambda request_id: self._stream_clients[self.home_of(request_id)]

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

    def stream_client(self, name: str) -> "redis.Redis":
        """An administrator's client of a stream server."""
        return self._stream_clients[name]

    def lose_data(self, name: str) -> None:
        """A stream server restarts without its files, and an operator lets it serve again."""
        server = self.stream_servers[name]
        self.emptied.add(name)
        server.kill()
        for folder in server.folder.glob("appendonly*"):
            shutil.rmtree(folder)
        server.start()
        with self._table_editor() as editor:
            editor.add(name)

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
        refused = []
        for client in (self.client, *self._stream_clients.values()):
            refused += client.acl_log()
            client.acl_log_reset()
        problems = [f"the user {each['username']} was refused {each['object']}: {each['context']}" for each in refused]
        if dropped := self.client.info("stats")["unexpected_error_replies"]:
            problems.append(f"{dropped} errors while the server loaded its append-only file")
        return problems

    def forget(self, handles: Sequence[AsyncResult]) -> None:
        """Long runs must not grow: neither this process nor the server keeps what is checked."""
        for handle in handles:
            handle.backend.remove_pending_result(handle)
            self.client.delete(result_key(handle.id), stream_key(handle.id))
            if self.stream_servers:
                self._stream_clients[self.home_of(handle.id)].delete(stream_key(handle.id))
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
        for client in self._stream_clients.values():
            client.close()
        for server in (*self.stream_servers.values(), self.server):
            server.close()

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
