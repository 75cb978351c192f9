"""`make fleet-idle`: what idle workers cost Redis, and how many of them one message wakes."""

import argparse
import time
from typing import Any

import redis
from rich.console import Console
from rich.table import Table

from fleet.workers import SleepingService, Spent, cpu_seconds, sleeping_service
from headrace_broker import Client
from headrace_broker.keys import queue_lists
from headrace_broker.queue.blocking_wait import wait_command

LIST = queue_lists("headrace.fleet")[0]
_MESSAGES = 20
_PAUSE_SECONDS = 0.3
"""Between two requests, so that each one finds all workers idle."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fleet.idle", description=__doc__)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 10, 50, 200])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--seconds", type=float, default=30.0, help="for which idle workers are watched")
    options = parser.parse_args()
    console = Console(width=120)
    with sleeping_service(step_seconds=0.01) as service:
        table = Table("waiting connections", "woken a message", "us of Redis a message", title="one message")
        for count in options.connections:
            with redis.Redis.from_url(service.url, max_connections=count + 1, protocol=2) as client:
                table.add_row(str(count), *wake(client, count))
        console.print(table)
        table = Table(
            "workers", "us of Redis a second and worker", "commands a second and worker", "scripts a request",
            "us of Redis a request", title="idle workers",
        )  # fmt: skip
        alone = _spent_in(service, options.seconds)
        for count in sorted(options.workers):
            service.start_workers(count - len(service.workers))
            time.sleep(5.0)  # the work of the start ends
            before = _spent_in(service, options.seconds)
            idle, per_worker = before - alone, options.seconds * count
            row = f"{idle.cpu_seconds / per_worker * 1e6:.0f}", f"{idle.commands / per_worker:.1f}"
            table.add_row(str(count), *row, *one_by_one(service, before, options.seconds))
        console.print(table)


def wake(client: "redis.Redis", count: int) -> tuple[str, str]:
    """Let so many connections wait as idle workers do, and send messages one by one."""
    waiting = [client.connection_pool.get_connection() for _ in range(count)]
    woken, cpu = 0, 0.0
    for _ in range(_MESSAGES):
        for connection in waiting:
            connection.send_command(*wait_command(LIST)[:-1], 60)
        while client.info("clients")["blocked_clients"] < count:
            pass
        started = cpu_seconds(client)
        read = cpu_seconds(client) - started  # what reading this costs
        client.lpush(LIST, "message")
        cpu += cpu_seconds(client) - started - 2 * read
        woken += count - client.info("clients")["blocked_clients"]
        client.flushall()
        for connection in waiting:
            connection.disconnect()
        while client.info("clients")["blocked_clients"]:
            pass
    for connection in waiting:
        client.connection_pool.release(connection)
    return f"{woken / _MESSAGES:.1f}", f"{cpu / _MESSAGES * 1e6:.0f}"


def one_by_one(service: SleepingService, before: Spent, seconds: float) -> tuple[str, str]:
    """Send requests of one token to idle workers, which spend `before` in so many seconds without a request."""
    with Client(service.url, model="tiny") as client:
        params: dict[str, Any] = {"max_tokens": 1, "ignore_eos": True}
        client.result(client.submit("x", params), timeout=60)
        started, first = time.monotonic(), Spent.read(service.client)
        for _ in range(_MESSAGES):
            client.result(client.submit("x", params), timeout=60)
            time.sleep(_PAUSE_SECONDS)
        share = (time.monotonic() - started) / seconds
        spent = Spent.read(service.client) - first
    scripts = (spent.scripts - before.scripts * share) / _MESSAGES
    cpu = (spent.cpu_seconds - before.cpu_seconds * share) / _MESSAGES
    return f"{scripts:.1f}", f"{cpu * 1e6:.0f}"


def _spent_in(service: SleepingService, seconds: float) -> Spent:
    before = Spent.read(service.client)
    time.sleep(seconds)
    return Spent.read(service.client) - before


if __name__ == "__main__":
    main()
