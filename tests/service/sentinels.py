"""`SentinelSite`: a master with its append-only file, a replica, and three Sentinels that watch them."""

import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

import redis

from headrace_broker.server.embedded import EmbeddedServer, free_port
from service.servers import PROGRAM, make_server

MASTER: Final = "mill"
PATIENCE: Final = 120.0
_SENTINELS: Final = 3
_QUORUM: Final = 2


class SentinelSite:
    """A context manager, ready when the Sentinels know each other and the replica is in step."""

    def __init__(self, folder: Path, *, program: str = PROGRAM, down_after_ms: int = 1000) -> None:
        self._folder = folder
        self._program = program
        self._down_after_ms = down_after_ms
        self._sentinels: list[subprocess.Popen[bytes]] = []
        self.ports: list[int] = []
        self.servers: list[EmbeddedServer] = []

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        return f"sentinel://{hosts}/0?master={MASTER}"

    def __enter__(self) -> Self:
        try:
            first = make_server(program=self._program, appendonly=True, arguments=["--repl-diskless-sync-delay", "0"])
            first.start()
            self.servers.append(first)
            replica = make_server(
                program=self._program,
                appendonly=True,
                arguments=["--replicaof", "127.0.0.1", str(first.port), "--repl-diskless-sync-delay", "0"],
            )
            replica.start()
            self.servers.append(replica)
            for _ in range(_SENTINELS):
                self._start_sentinel(first.port)
            self.wait_watched()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_sentinel(self, master_port: int) -> None:
        port = free_port()
        file = self._folder / f"sentinel-{port}.conf"
        lines = [
            f"port {port}",
            "bind 127.0.0.1",
            f"dir {self._folder}",
            f"logfile {self._folder}/sentinel-{port}.log",
            f"sentinel monitor {MASTER} 127.0.0.1 {master_port} {_QUORUM}",
            f"sentinel down-after-milliseconds {MASTER} {self._down_after_ms}",
            f"sentinel failover-timeout {MASTER} 3000",
        ]
        file.write_text("\n".join(lines) + "\n")
        self._sentinels.append(subprocess.Popen([self._program, str(file), "--sentinel"], stdin=subprocess.DEVNULL))
        self.ports.append(port)

    def state(self, port: int) -> Mapping[str, Any]:
        """What one Sentinel says about the master."""
        with redis.Redis(port=port, socket_timeout=5, protocol=2) as sentinel:
            return dict(sentinel.sentinel_master(MASTER))

    def master(self) -> EmbeddedServer:
        """The server that most Sentinels take for the master."""
        ports = [self._master_port(port) for port in self.ports]
        agreed = max(set(ports), key=ports.count)
        return next(server for server in self.servers if server.port == agreed)

    def elections(self) -> int:
        """The number of the newest election that a Sentinel knows of."""
        return max(int(self.state(port)["config-epoch"]) for port in self.ports)

    def _master_port(self, port: int) -> int:
        try:
            return int(self.state(port)["port"])
        except redis.RedisError:
            return 0

    def wait_watched(self) -> None:
        """Wait until every Sentinel knows the others and the replica, and the replica follows."""
        deadline = time.monotonic() + PATIENCE
        while not all(self._watches(port) for port in self.ports) or not self._follows():
            assert time.monotonic() < deadline, [self.state(port) for port in self.ports]
            time.sleep(0.05)

    def _watches(self, port: int) -> bool:
        try:
            state = self.state(port)
        except redis.RedisError:
            return False
        flags = set(str(state["flags"]).split(","))
        return (state["num-slaves"], state["num-other-sentinels"], flags) == (1, _SENTINELS - 1, {"master"})

    def replica(self) -> EmbeddedServer:
        """The server that is not the master."""
        master = self.master()
        return next(server for server in self.servers if server is not master)

    def _follows(self) -> bool:
        try:
            with redis.Redis(port=self.replica().port, protocol=2) as replica:
                info = replica.info("replication")
        except redis.RedisError:
            return False
        return (info["role"], info.get("master_link_status"), info.get("master_sync_in_progress")) == ("slave", "up", 0)

    def wait_failed_over(self, old: EmbeddedServer) -> EmbeddedServer:
        """Wait until the Sentinels agree on another master, and it says that it is one."""
        deadline = time.monotonic() + PATIENCE
        while True:
            found = self.master()
            if found is not old:
                with redis.Redis(port=found.port, protocol=2) as client:
                    if client.info("replication")["role"] == "master":
                        return found
            assert time.monotonic() < deadline, [self.state(port) for port in self.ports]
            time.sleep(0.05)

    def close(self) -> None:
        for sentinel in self._sentinels:
            sentinel.send_signal(signal.SIGKILL)
            sentinel.wait()
        for server in self.servers:
            server.close()
