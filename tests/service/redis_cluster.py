"""`ClusterSite`: a Redis Cluster of three masters on loopback, each with a replica, without its command line."""

import time
from collections.abc import Callable
from typing import Any, Final, Self

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from headrace_broker.server.connections import connect
from headrace_broker.server.embedded import EmbeddedServer
from service.servers import PROGRAM, make_server

NODE_TIMEOUT: Final = 1.0
PATIENCE: Final = 120.0
_MASTERS: Final = 3


class ClusterSite:
    """A context manager, ready when all nodes agree and the replicas are in step."""

    def __init__(self, *, program: str = PROGRAM) -> None:
        arguments = ["--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"]
        arguments += ["--cluster-node-timeout", str(int(NODE_TIMEOUT * 1000)), "--repl-diskless-sync-delay", "0"]
        arguments += ["--cluster-replica-validity-factor", "0"]
        self.servers: Final = [make_server(program=program, arguments=arguments) for _ in range(2 * _MASTERS)]
        self.clients: list[redis.Redis] = []

    @property
    def url(self) -> str:
        """The URL, with two nodes of which one may die."""
        return f"redis+cluster://127.0.0.1:{self.servers[0].port},127.0.0.1:{self.servers[_MASTERS - 1].port}"

    def __enter__(self) -> Self:
        try:
            for server in self.servers:
                server.start()
                self.clients.append(connect(server.url))
            self._form()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for client in self.clients:
            client.close()
        for server in self.servers:
            server.close()

    def _form(self) -> None:
        masters, replicas = self.clients[:_MASTERS], self.clients[_MASTERS:]
        for number, master in enumerate(masters):
            bounds = [place * REDIS_CLUSTER_HASH_SLOTS // _MASTERS for place in (number, number + 1)]
            _run(master, "ADDSLOTSRANGE", bounds[0], bounds[1] - 1)
            _run(master, "SET-CONFIG-EPOCH", number + 1)
        for server in self.servers[1:]:
            _run(masters[0], "MEET", "127.0.0.1", server.port)
        for client in self.clients:
            wait_until(lambda client=client: len(nodes_of(client)) == len(self.servers))
        for master, replica in zip(masters, replicas, strict=True):
            _run(replica, "REPLICATE", _id_of(master))
        for client in self.clients:
            wait_until(lambda client=client: _run(client, "INFO").find(b"cluster_state:ok") >= 0)
        for replica in replicas:
            wait_until(lambda replica=replica: replica.info("replication").get("master_link_status") == "up")

    def _slots(self) -> Any:
        return _run(next(client for client in self.clients if _answers(client)), "SLOTS")

    def master_ports(self) -> list[int]:
        return sorted({node[1] for _, _, node, *_ in self._slots()})

    def master_of(self, key: str) -> EmbeddedServer:
        """Return the server that has the slot of a key now."""
        slot = key_slot(key.encode())
        port = next(node[1] for first, last, node, *_ in self._slots() if first <= slot <= last)
        return next(server for server in self.servers if server.port == port)

    def client_of(self, server: EmbeddedServer) -> "redis.Redis":
        return self.clients[self.servers.index(server)]

    def client_at(self, port: int) -> "redis.Redis":
        return next(self.client_of(server) for server in self.servers if server.port == port)

    def kill_master_of(self, key: str) -> None:
        """Kill the node that has the slot of a key. Its replica takes over after the node timeout."""
        self.master_of(key).kill()

    def move(self, key: str) -> None:
        """Move the slot of a key to another master, with all its keys, as resharding does it."""
        slot, old = key_slot(key.encode()), self.client_of(self.master_of(key))
        port = next(port for port in self.master_ports() if self.client_at(port) is not old)
        new = self.client_at(port)
        _run(new, "SETSLOT", slot, "IMPORTING", _id_of(old))
        _run(old, "SETSLOT", slot, "MIGRATING", _id_of(new))
        while keys := _run(old, "GETKEYSINSLOT", slot, 10):
            for name in keys:
                old.execute_command("MIGRATE", "127.0.0.1", port, name, 0, 5000)
        for client in (new, old):
            _run(client, "SETSLOT", slot, "NODE", _id_of(new))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "the cluster is not ready"
        time.sleep(0.02)


def nodes_of(client: "redis.Redis") -> list[bytes]:
    """Return the lines of CLUSTER NODES."""
    found: bytes = _run(client, "NODES")
    return found.splitlines()


def _run(client: "redis.Redis", *command: Any) -> Any:
    """Run a command of CLUSTER and return its reply as it is."""
    connection = client.connection_pool.get_connection()
    try:
        connection.send_command("CLUSTER", *command)
        return connection.read_response()
    finally:
        client.connection_pool.release(connection)


def _id_of(client: "redis.Redis") -> bytes:
    found: bytes = _run(client, "MYID")
    return found


def _answers(client: "redis.Redis") -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
