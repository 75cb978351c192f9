"""What a tenant notices while another one attacks the gateway: `make attacks`.

    cd tests && python -m load.attacks [attack ...] [--seconds S] [--seed N]

Runs a real server, a real gateway, and a real worker whose engine sleeps. One tenant chats and lists models and files,
first alone, then during each attack of another one. Prints the times of both, the longest turn of the gateway's event
loop, and the memory of Redis. The exit status is 1 if the 99th percentile of the chats is more than twice that of the
tenant alone, if that of the lists is above 100 ms, if a turn of the event loop takes more than 50 ms of processor time,
or if Redis holds more than 400 MB.

The attackers run in a niced process of their own. Elsewhere they have machines of their own, so that neither their
processor time nor their interpreter's lock may count as the gateway's.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from chaos.model import MAX_MODEL_LEN, save_chaos_model
from headrace_broker.server.embedded import EmbeddedServer
from headrace_cli.demo.stream_timing import percentile
from headrace_gateway.requests.request_size import OWN_BYTES, TOKEN_BYTES
from load.hostile_bodies import hostile_bodies
from load.processes import resident_mib
from service.gateway.gateway_process import GatewayProcess
from service.gateway.in_process import bearer, write_keys
from service.workers.service import Service

TESTS = Path(__file__).parents[1]
MAX_REDIS_MB = 400
MAX_MODELS_SECONDS = 0.1
MAX_WORK_SECONDS = 0.05
SLOWER = 2.0
ATTACKERS = 3
"""Connections that attack at a time."""
PROBE = """
import os, selectors, time
turns = open(os.environ["LOOP_TURNS_FILE"], "a", buffering=1)
class Probe(selectors.DefaultSelector):
    began = None
    def select(self, timeout=None):
        now = time.monotonic()
        if self.began is not None and now - self.began > 0.01:
            print(now - self.began, time.thread_time() - self.worked, file=turns)
        events = super().select(timeout)
        self.began, self.worked = time.monotonic(), time.thread_time()
        return events
selectors.DefaultSelector = Probe
from headrace_cli.main import main
main()
"""
JSON = {"Content-Type": "application/json"}
CHAT = "/v1/chat/completions"


@dataclass
class Site:
    """A running gateway, and how to call it."""

    port: int
    keys: dict[str, str]
    draw: random.Random

    def call(self, key: str, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        """Return status and body; 0 if the connection was closed before the response."""
        named = JSON | bearer(self.keys[key]) | headers
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(method, path, body, named)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            return 0, b""
        finally:
            connection.close()


Attack = Callable[[], int]
"""One request. Returns its status."""


def bodies(site: Site) -> Attack:
    """Bodies of 4 MiB that are slow to parse, and invalid."""
    found = list(hostile_bodies())
    return lambda: site.call("attacker", "POST", *site.draw.choice(found))[0]


def chunks(site: Site) -> Attack:
    """1.8 MB in chunks of one byte, without a key."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    request = head + b"1\r\na\r\n" * 300_000

    def send() -> int:
        time.sleep(0.05)
        with socket.create_connection(("127.0.0.1", site.port), 60) as connection:
            try:
                connection.sendall(request)
                return int(connection.recv(65536).split()[1])
            except OSError:  # closed before the response was read
                return 0

    return send


def silence(site: Site) -> Attack:
    """250 new connections a second that send nothing."""
    held = deque[socket.socket](maxlen=2000)

    def connect() -> int:
        held.append(socket.create_connection(("127.0.0.1", site.port), 60))
        time.sleep(0.004)
        return 0

    return connect


def stored(site: Site) -> Attack:
    """Background responses as large as the gateway takes them for this model."""
    size = OWN_BYTES + TOKEN_BYTES * MAX_MODEL_LEN - 1000
    body = {"model": "tiny", "input": "x" * size, "background": True, "max_output_tokens": 1}
    encoded = json.dumps(body).encode()
    return lambda: site.call("attacker", "POST", "/v1/responses", encoded)[0]


def blanks(site: Site) -> Attack:
    """Batches whose input is 190 MiB of blank lines."""
    form = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
        b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"\n" * (190 * 2**20) + b"\r\n--b--\r\n"
    )
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    batch: list[bytes] = []

    def send() -> int:
        if not batch:
            file = json.loads(site.call("attacker", "POST", "/v1/files", form, **kind)[1])["id"]
            fields = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
            batch.append(json.dumps(fields).encode())
        time.sleep(0.5)
        return site.call("attacker", "POST", "/v1/batches", batch[0])[0]

    return send


def choices(site: Site) -> Attack:
    """Completions of 16 prompts with 64 choices each, the most that one request may ask for."""
    body = {"model": "tiny", "prompt": ["x"] * 16, "n": 64, "max_tokens": 64, "temperature": 1.0, "ignore_eos": True}
    encoded = json.dumps(body).encode()
    return lambda: site.call("attacker", "POST", "/v1/completions", encoded)[0]


ATTACKS: dict[str, Callable[[Site], Attack]] = {
    attack.__name__: attack for attack in (bodies, chunks, silence, stored, blanks, choices)
}
"""They prepare what they send, and return what sends it."""


def attack_until_told(site: Site, name: str, pipe: Connection) -> None:
    """Attack from when the pipe has a message until it has the next one. Send the number of responses by status."""
    os.nice(19)
    attack, statuses = ATTACKS[name](site), dict[int, int]()

    def repeat() -> None:
        while True:
            status = attack()
            statuses[status] = statuses.get(status, 0) + 1

    pipe.send(None)
    pipe.recv()
    for _ in range(1 if name in ("silence", "blanks") else ATTACKERS):
        threading.Thread(target=repeat, daemon=True).start()
    pipe.recv()
    pipe.send(dict(statuses))


@contextmanager
def attacking(site: Site, name: str) -> Iterator[dict[int, int]]:
    """Attack while the block runs. Yields a dict that has the number of responses by status afterwards."""
    context, statuses = multiprocessing.get_context("spawn"), dict[int, int]()
    ours, its = context.Pipe()
    process = context.Process(target=attack_until_told, args=(site, name, its), daemon=True)
    process.start()
    its.close()
    ours.recv()
    ours.send(None)
    yield statuses
    ours.send(None)
    statuses |= ours.recv()
    process.kill()
    process.join()


def tenant_times(site: Site, seconds: float) -> tuple[list[float], list[float]]:
    """Return the times of the other tenant's chats, and of its lists of models and files."""
    ends = time.monotonic() + seconds
    chat = json.dumps({"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}).encode()
    chats: list[float] = []
    lists: list[float] = []

    def repeat(times: list[float], pause: float, *call: Any) -> None:
        while time.monotonic() < ends:
            began = time.monotonic()
            status, body = site.call("tenant", *call)
            times.append(time.monotonic() - began)
            assert status == 200, (status, body)
            time.sleep(pause)

    threads = [
        threading.Thread(target=repeat, args=(chats, 0.02, "POST", CHAT, chat)),
        threading.Thread(target=repeat, args=(lists, 0.02, "GET", "/v1/models")),
        threading.Thread(target=repeat, args=(lists, 0.1, "GET", "/v1/files")),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return chats, lists


def measure(site: Site, service: Service, turns: Path, seconds: float) -> dict[str, Any]:
    before = len(turns.read_text().splitlines())
    chats, lists = tenant_times(site, seconds)
    measured = [tuple(map(float, line.split())) for line in turns.read_text().splitlines()[before:]]
    return {
        "chats": len(chats),
        "chat_p50_ms": round(1000 * percentile(chats, 50)),
        "chat_p99_ms": round(1000 * percentile(chats, 99)),
        "lists_p99_ms": round(1000 * percentile(lists, 99)),
        "longest_turn_ms": round(1000 * max((turn for turn, _ in measured), default=0.0)),
        "longest_work_ms": round(1000 * max((work for _, work in measured), default=0.0)),
        "redis_mb": round(service.client.info("memory")["used_memory"] / 1e6),
    }


def problems_of(found: dict[str, Any], alone: dict[str, Any]) -> list[str]:
    problems = []
    if found["chat_p99_ms"] > SLOWER * alone["chat_p99_ms"]:
        problems.append(f"chats took {found['chat_p99_ms']} ms (p99), alone {alone['chat_p99_ms']} ms")
    if found["lists_p99_ms"] > 1000 * MAX_MODELS_SECONDS:
        problems.append(f"lists took {found['lists_p99_ms']} ms (p99)")
    if found["longest_work_ms"] > 1000 * MAX_WORK_SECONDS:
        problems.append(f"a turn of the event loop worked for {found['longest_work_ms']} ms")
    if found["redis_mb"] > MAX_REDIS_MB:
        problems.append(f"Redis holds {found['redis_mb']} MB")
    return problems


@contextmanager
def running_site(folder: Path, seed: int) -> Iterator[tuple[Site, Service, GatewayProcess, Path]]:
    """Run a server, a worker whose engine sleeps 5 ms a step, and a gateway with a probe in its event loop."""
    turns = folder / "turns"
    turns.touch()
    os.environ |= {
        "PYTHONPATH": str(TESTS),
        "LOAD_STEP_SECONDS": "0.005",
        "LOAD_PUBLISH_FILE": str(folder / "publish.json"),
        "LOOP_TURNS_FILE": str(turns),
    }
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedServer(environ={}, password=False, appendonly=True))
        service = Service(server, save_chaos_model(folder / "tiny"), folder)
        stack.callback(service.close)
        worker = service.start_worker(command=[sys.executable, "-m", "load.worker"], max_num_seqs=64)
        gateway = GatewayProcess(
            redis_url=server.url,
            log=folder / "gateway.log",
            command=[sys.executable, "-c", PROBE, "gateway"],
            keys=folder / "keys",
            files=folder / "files",
        )
        stack.callback(gateway.close)
        keys = write_keys(folder / "keys", "tenant", "attacker", have_tenants=True)
        worker.wait_ready()
        yield Site(gateway.wait_ready().port, keys, random.Random(seed)), service, gateway, turns


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m load.attacks", description=__doc__)
    parser.add_argument("attacks", nargs="*", help=f"{', '.join(ATTACKS)} [default: all]")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each attack, and of the tenant alone")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        for name in chosen.attacks or ATTACKS:
            folder = Path(temporary) / name
            folder.mkdir()
            with running_site(folder, chosen.seed) as (site, service, gateway, turns):
                tenant_times(site, 2.0)
                alone = measure(site, service, turns, chosen.seconds)
                with attacking(site, name) as statuses:
                    found = measure(site, service, turns, chosen.seconds)
                problems = problems_of(found, alone)
                found |= {"gateway_mib": round(resident_mib(gateway.process.pid)), "statuses": statuses}
                report = {"attack": name, "alone": alone, "attacked": found, "problems": problems}
                sys.stdout.write(json.dumps(report) + "\n")
                sys.stdout.flush()
                failed |= bool(problems)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
