"""`make chaos-canvas`: Celery's chains and chords while workers and Redis are killed, with a count of each callback.

Two runs. In the first, a plain Celery worker runs what comes before and after the requests, and Headrace's workers are
killed as soon as a result was stored, which is just before the callbacks are sent. In the second, Redis is killed, too.
Nobody takes the callbacks of that run, because a plain Celery worker loses and repeats messages when its Redis is
killed: they are counted in their queue. Exit status 1 if a callback is missing, or was sent twice.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import redis
from celery import Signature, chain, chord
from celery.result import denied_join_result
from rich.console import Console
from rich.table import Table

from chaos.model import save_chaos_model
from service.servers import make_server
from service.workers.service import QUEUE, Service
from service.workers.shop_app import ShopWorker, close_app, make_app

SETTINGS: Final = {
    "callback_tasks": "shop.*",
    "callback_queues": "celery,audit",
    "lease_seconds": 2.0,
    "delivery_limit": 1000,
    "max_num_seqs": 16,
}
PATIENCE: Final = 900.0
"""Seconds without a new callback after which a run gives up."""


@dataclass
class Account:
    """What became of the callbacks of one run."""

    name: str
    seed: int
    expected: int = 0
    worker_kills: int = 0
    redis_kills: int = 0
    missing: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def problems(self) -> list[str]:
        return [f"missing: {each}" for each in self.missing] + [f"twice: {each}" for each in self.twice]


class Canvas:
    """A service, and chains and chords whose callbacks are counted.

    Args:
        has_shop: a plain Celery worker runs the callbacks. Otherwise they stay in the queue `audit`.
    """

    def __init__(self, folder: Path, seed: int, *, has_shop: bool, num_workers: int = 2) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.draw = random.Random(seed)
        self.server = make_server(appendonly=True)
        self.server.start()
        self.service = Service(self.server, save_chaos_model(folder / "tiny"), folder)
        self.app = make_app(self.server.url)
        self.has_shop = has_shop
        self.shop = ShopWorker(self.server.url, folder / "shop.log", "celery") if has_shop else None
        self.workers = [self.service.start_worker(**SETTINGS) for _ in range(num_workers)]
        self.expected: set[str] = set()
        """The task ids of the callbacks."""

    def send(self, chains: int, chords: int, size: int) -> None:
        """Send chains of a request and a callback, and chords of `size` requests."""
        with denied_join_result():  # so that Celery subscribes to no result
            self._send(chains, chords, size)

    def _send(self, chains: int, chords: int, size: int) -> None:
        for number in range(chains):
            steps = [self._generate(f"chain {number}"), self._callback("store")]
            if self.has_shop:
                steps = [self.app.signature("shop.fetch", args=(f"chain {number}",)), self._generate(), steps[-1]]
            self.expected.add(chain(*steps, app=self.app).apply_async().id)
        for number in range(chords):
            header = [self._generate(f"chord {number} {part}") for part in range(size)]
            self.expected.add(chord(header, self._callback("gather"), app=self.app).apply_async().id)

    def _generate(self, *prompt: str) -> Signature:
        params = {"temperature": 0.0, "max_tokens": self.draw.randint(8, 40), "ignore_eos": True}
        return self.app.signature("headrace.generate", args=prompt, kwargs={"sampling_params": params}, queue=QUEUE)

    def _callback(self, name: str) -> Signature:
        return self.app.signature(f"shop.{name}", queue="celery" if self.has_shop else "audit")

    def counted(self) -> Counter[str]:
        """Count how often each callback has run, or how often it is in its queue."""
        client = self.service.client
        if self.has_shop:
            return Counter({key.decode(): int(runs) for key, runs in client.hgetall("shop:runs").items()})
        return Counter(json.loads(message)["headers"]["id"] for message in client.lrange("audit", 0, -1))

    def kill_a_worker(self) -> None:
        """kill -9 of a worker, and a new one in its place."""
        number = self.draw.randrange(len(self.workers))
        self.workers[number].kill()
        self.workers[number] = self.service.start_worker(**SETTINGS)

    def kill_redis(self) -> None:
        self.server.kill()
        self.server.start()

    def wait_stored(self) -> None:
        """Wait until the result of a request is stored."""
        with self.service.client.pubsub() as results:
            results.psubscribe("celery-task-meta-*")
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline:
                found = results.get_message(timeout=1)
                if found and found["type"] == "pmessage":
                    return

    def close(self) -> None:
        close_app(self.app)
        if self.shop is not None:
            self.shop.close()
        self.service.close()
        self.server.close()


@contextmanager
def canvas(*args: Any, **options: Any) -> Iterator[Canvas]:
    made = Canvas(*args, **options)
    try:
        yield made
    finally:
        made.close()


def run(
    folder: Path, seed: int, *, chains: int, chords: int, size: int, worker_kills: int, redis_kills: int = 0
) -> Account:
    """Send the chains and chords, and kill while their callbacks come. The kills are spread over the results."""
    account = Account("workers and Redis" if redis_kills else "workers", seed)
    with canvas(folder, seed, has_shop=not redis_kills) as made:
        for worker in made.workers:
            worker.wait_ready()
        started = time.monotonic()
        made.send(chains, chords, size)
        account.expected = len(made.expected)
        faults = ["worker"] * worker_kills + ["redis"] * redis_kills
        made.draw.shuffle(faults)
        total = chains + chords * size
        for number, fault in enumerate(faults):
            wait_results(made, total * number // (len(faults) + 1))
            if fault == "redis":
                made.kill_redis()
                account.redis_kills += 1
            else:
                made.wait_stored()
                made.kill_a_worker()
                account.worker_kills += 1
        found = wait_callbacks(made)
        account.missing = sorted(made.expected - found.keys())
        account.twice = sorted(key for key, count in found.items() if count > 1)
        account.seconds = time.monotonic() - started
    return account


def wait_results(made: Canvas, count: int) -> None:
    """Wait until so many requests have a result."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with suppress(redis.ConnectionError):
            if sum(1 for _ in made.service.client.scan_iter("headrace:ended:*", count=1000)) >= count:
                return
        time.sleep(0.05)
    raise AssertionError(f"fewer than {count} requests have ended\n{made.service.logs()}")


def wait_callbacks(made: Canvas) -> Counter[str]:
    """Wait until every callback has come, and then until nothing is queued or leased. Returns the counts."""
    deadline, last = time.monotonic() + PATIENCE, -1
    while time.monotonic() < deadline:
        found = made.counted()
        if made.expected <= found.keys():
            made.service.wait_settled(PATIENCE)
            break
        if len(found) > last:
            deadline, last = time.monotonic() + PATIENCE, len(found)
        time.sleep(0.1)
    return made.counted()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos.canvas", description=__doc__)
    parser.add_argument("--chains", type=int, default=200)
    parser.add_argument("--chords", type=int, default=20)
    parser.add_argument("--size", type=int, default=50, help="requests of a chord")
    parser.add_argument("--kills", type=int, default=30, help="of workers; a third of it in the second run")
    parser.add_argument("--redis-kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the service's processes are ended on the way out
    size = {"chains": options.chains, "chords": options.chords, "size": options.size}
    with tempfile.TemporaryDirectory() as folder:
        accounts = [
            run(Path(folder) / "workers", options.seed, **size, worker_kills=options.kills),
            run(
                Path(folder) / "redis",
                options.seed,
                **size,
                worker_kills=options.kills // 3,
                redis_kills=options.redis_kills,
            ),
        ]
    columns = ("killed", "callbacks", "worker kills", "Redis kills", "missing", "twice", "seconds")
    table = Table(*columns, title=f"seed {options.seed}")
    for each in accounts:
        row = (each.expected, each.worker_kills, each.redis_kills, len(each.missing), len(each.twice))
        table.add_row(each.name, *map(str, row), f"{each.seconds:.0f}")
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    for each in accounts:
        sys.stdout.writelines(f"{each.name}: {problem}\n" for problem in each.problems)
    return 1 if any(each.problems for each in accounts) else 0


if __name__ == "__main__":
    sys.exit(main())
