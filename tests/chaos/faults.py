"""What is done to the service, one fault a function. Each returns when the fault is over; recovery is the service's.

A fault that takes somebody away returns for how many seconds nobody else could have gone on with his requests: the
lease, or the start of a new process. What a stream is silent beyond that is the service's own.
"""

import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from chaos import load, poison
from chaos.site import Site
from headrace_broker import Client
from headrace_broker.server.embedded import EmbeddedServer, free_port


@contextmanager
def full_disk(server: EmbeddedServer) -> Iterator[None]:
    """While the block runs, the server's files do not grow."""
    assert server.pid is not None
    size = max(file.stat().st_size for file in server.folder.rglob("*.aof"))
    _, hard = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))


_ENGINE_READY = "engine ready after"
_WAVES, _CHOICES = 4, 8
_MORE_REQUESTS = 6
_POISON_SECONDS = 300.0  # three engines start again, one after the other

Fault = Callable[[Site, random.Random], float | None]


def in_random_order(faults: Sequence[Fault], count: int, draw: random.Random) -> Iterator[Fault]:
    """Choose `count` faults, each as often as the others."""
    order: list[Fault] = []
    for _ in range(count):
        if not order:
            order = list(faults)
            draw.shuffle(order)
        yield order.pop()


def kill_worker(site: Site, draw: random.Random) -> float:
    """kill -9 of a worker; a new one is started in its place."""
    post = site.any_post(draw)
    post.worker.kill()
    post.start()
    return site.lease_seconds


def kill_all_workers(site: Site, draw: random.Random) -> float:
    """kill -9 of every worker at once."""
    killed_at = time.monotonic()
    for post in site.posts:
        post.worker.kill()
    for post in site.posts:
        post.start()
    site.wait_any_ready()
    return max(time.monotonic() - killed_at, site.lease_seconds)


def kill_engine(site: Site, draw: random.Random) -> float:
    """kill -9 of a worker's engine process."""
    worker = site.any_post(draw).worker
    num_starts = worker.log_text().count(_ENGINE_READY)
    killed_at = time.monotonic()
    os.kill(worker.engine_pid(), signal.SIGKILL)
    worker.wait_for_log(_ENGINE_READY, count=num_starts + 1)
    return time.monotonic() - killed_at


def freeze_worker(site: Site, draw: random.Random) -> float:
    """SIGSTOP of a worker for longer than its lease, then SIGCONT: it comes back to work that others have."""
    worker = site.any_post(draw).worker
    worker.send_signal(signal.SIGSTOP)
    time.sleep(site.lease_seconds + draw.uniform(0.5, 2.0))
    worker.send_signal(signal.SIGCONT)
    return site.lease_seconds


def freeze_worker_and_engine(site: Site, draw: random.Random) -> float:
    """The same for the whole process family, as a paused virtual machine does it."""
    pids = site.any_post(draw).worker.processes()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(site.lease_seconds + draw.uniform(0.5, 2.0))
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    return site.lease_seconds


def kill_connections(site: Site, draw: random.Random) -> None:
    """CLIENT KILL of every connection to the server."""
    site.client.client_kill_filter(_type="normal", skipme=True)
    site.client.client_kill_filter(_type="pubsub", skipme=True)


def restart_redis(site: Site, draw: random.Random) -> None:
    """kill -9 of the server, which comes back with its append-only file."""
    site.server.kill()
    time.sleep(draw.uniform(0.0, 1.5))
    site.server.start()


def drain_worker(site: Site, draw: random.Random) -> None:
    """SIGTERM with a grace that is too short; a new worker is started in its place."""
    post = site.any_post(draw)
    post.worker.send_signal(signal.SIGTERM)
    post.worker.wait()
    post.start()


def stall_network(site: Site, draw: random.Random) -> None:
    """Nothing passes between a worker and the server for up to twice the lease, and then all of it at once."""
    proxy = site.any_post(draw).proxy
    proxy.stall()
    time.sleep(draw.uniform(0.3, 2 * site.lease_seconds))
    proxy.heal()


def refuse_network(site: Site, draw: random.Random) -> None:
    """A worker's connections are reset and none is accepted for up to twice the lease."""
    proxy = site.any_post(draw).proxy
    proxy.refuse()
    time.sleep(draw.uniform(0.3, 2 * site.lease_seconds))
    proxy.heal()


def fill_disk(site: Site, draw: random.Random) -> None:
    """The server's disk takes no more for up to twice the lease: the server refuses every write."""
    with full_disk(site.server):
        time.sleep(draw.uniform(1.0, 2 * site.lease_seconds))


def better_requests(site: Site, draw: random.Random) -> float:
    """Waves of a better priority, each of more choices than there are slots, and kill -9 of a worker in one of them."""
    kill_in = draw.randrange(_WAVES)
    params = {"max_tokens": 20, "temperature": 1.0, "n": _CHOICES, "ignore_eos": True}
    for wave in range(_WAVES):
        count = 1 + len(site.posts) * site.slots // _CHOICES
        handles = [
            site.service.send({"prompt": "now", "sampling_params": {**params, "seed": seed}}) for seed in range(count)
        ]
        if wave == kill_in:
            time.sleep(draw.uniform(0.0, 0.3))
            kill_worker(site, draw)
        logs = site.service.wait_ended([handle.id for handle in handles])
        assert all(log.end is not None and log.end["error"] is None for log in logs.values())
        site.forget(handles)
    return site.lease_seconds


def kill_gateway(site: Site, draw: random.Random) -> None:
    """kill -9 of a gateway, then of the other one; each is started again before the next is killed."""
    for gateway in draw.sample(site.gateways, k=len(site.gateways)):
        gateway.kill()
        time.sleep(draw.uniform(0.0, 0.5))
        gateway.start()
        gateway.wait_ready()


def cut_readers(site: Site, draw: random.Random) -> None:
    """Clients of the gateways lose their connections, again and again, and rejoin at whatever replica they find."""
    for _ in range(10):
        for reader in site.readers:
            if draw.random() < 0.7:
                reader.cut()
        time.sleep(draw.uniform(0.0, 0.2))


def cancel_requests(site: Site, draw: random.Random) -> None:
    """Some more requests come, and are cancelled in the midst of their streams, by the client or by Celery's revoke."""
    kinds = load.kinds()
    handles = [
        site.send_doomed(kinds[number].body, number, "cancelled")
        for number in draw.choices(range(len(kinds)), k=_MORE_REQUESTS)
    ]
    with Client(site.settings_of("client"), model="tiny") as client:
        for handle in handles:
            site.service.wait_tokens([handle.id], at_least=draw.randrange(1, 5))
            if draw.random() < 0.5:
                client.cancel(handle.id)
            else:
                site.operator.control.revoke(handle.id, terminate=True)


def pass_deadlines(site: Site, draw: random.Random) -> None:
    """Some more requests come, whose time is over in the midst of their streams, or before."""
    kinds = load.kinds()
    for number in draw.choices(range(len(kinds)), k=_MORE_REQUESTS):
        # not `expires`: each worker judges by its own clock, and these are hours apart
        site.send_doomed(kinds[number].body, number, "expired", time_limit=draw.uniform(0.05, 1.0))


def send_poison(site: Site, draw: random.Random) -> None:
    """One more request comes, which kills every engine that computes it, and its neighbours with it."""
    handle = site.send_doomed({"prompt_token_ids": poison.TOKENS}, None, "dead_letter")
    site.service.wait_ended([handle.id], _POISON_SECONDS)


FAULTS: tuple[Fault, ...] = (
    kill_worker,
    kill_engine,
    freeze_worker,
    kill_connections,
    restart_redis,
    drain_worker,
    stall_network,
    refuse_network,
    fill_disk,
    better_requests,
    freeze_worker_and_engine,
    kill_all_workers,
    kill_gateway,
    cut_readers,
    cancel_requests,
    pass_deadlines,
    send_poison,
)


def restart_stream_server(site: Site, draw: random.Random) -> None:
    """kill -9 of a stream server, which comes back with its append-only file."""
    server = draw.choice(list(site.stream_servers.values()))
    server.kill()
    time.sleep(draw.uniform(0.0, 3.0))
    server.start()


def freeze_stream_server(site: Site, draw: random.Random) -> None:
    """SIGSTOP of a stream server for a while, then SIGCONT."""
    server = draw.choice(list(site.stream_servers.values()))
    os.kill(server.pid or 0, signal.SIGSTOP)
    time.sleep(draw.uniform(0.2, 2 * site.lease_seconds))
    os.kill(server.pid or 0, signal.SIGCONT)


def fill_stream_disk(site: Site, draw: random.Random) -> None:
    """A stream server's disk takes no more for a while: the server refuses every write."""
    with full_disk(draw.choice(list(site.stream_servers.values()))):
        time.sleep(draw.uniform(1.0, 2 * site.lease_seconds))


def demote_stream_server(site: Site, draw: random.Random) -> None:
    """A stream server is a replica for a while, as after a failover: it answers reads, and refuses every write."""
    client = site.stream_client(draw.choice(list(site.stream_servers)))
    client.replicaof("127.0.0.1", free_port())  # no master is there, so it keeps its data
    time.sleep(draw.uniform(0.2, 2 * site.lease_seconds))
    client.replicaof("NO", "ONE")


def empty_stream_server(site: Site, draw: random.Random) -> None:
    """A stream server restarts without its data, and an operator runs `headrace streams add`.

    Its streams are lost. All other requests, and all later ones, must be served as ever.
    """
    time.sleep(draw.uniform(0.0, 1.0))
    site.lose_data(draw.choice(list(site.stream_servers)))


STREAM_SERVER_FAULTS: Sequence[Fault] = (
    restart_stream_server,
    freeze_stream_server,
    fill_stream_disk,
    demote_stream_server,
    empty_stream_server,
)
"""Further faults of a site with stream servers."""
