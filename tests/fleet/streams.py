"""`make fleet`: a fleet that writes its streams to several servers, while one of them is killed and comes back.

Then one server is added and one is drained. Every chunk must arrive once and in order. While a server is away, the
streams of the others must continue. Exit status 1 where that is not so. The table compares the processor time of the
servers with that of a single one.
"""

import argparse
import asyncio
import gc
import math
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from fleet.workers import SLOTS, SleepingService, cpu_seconds, sleeping_service, worker_cpu_seconds
from headrace_broker import AsyncClient, BrokerSettings
from headrace_broker.server.connections import connect, connect_async
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.server.stream_servers import AsyncStreamServers, StreamServers
from headrace_broker.server.stream_table_editor import StreamTableEditor
from headrace_broker.streams.events import ChunkEvent, EndEvent
from headrace_broker.streams.hub import StreamHub
from headrace_cli.demo.stream_timing import percentile
from service.servers import make_server

KILLED, BACK, ADDED, DRAINED = 20.0, 30.0, 35.0, 40.0
"""Seconds from the start at which the first server is killed and comes back, one is added and the second is drained."""
LONGEST_GAP = 1.0
"""Seconds that a stream of another server may be silent while one is away."""


@dataclass
class Account:
    """What the readers have seen."""

    began: float = field(default_factory=time.monotonic)
    chunks: int = 0
    ended: int = 0
    problems: list[str] = field(default_factory=list)
    gaps: list[tuple[float, float, str]] = field(default_factory=list)
    """Time from the start at which a chunk arrived, seconds since the one before, and the server of the stream."""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def quiet_gaps(self) -> list[float]:
        """The gaps before the first server is killed, without those of the first seconds."""
        return [gap for at, gap, _ in self.gaps if 5.0 <= at < KILLED]

    def longest_gap(self, since: float, until: float, without: str) -> float:
        """Return the longest gap of a stream on another server than `without` that ended between two times."""
        return max((gap for at, gap, home in self.gaps if since <= at < until and home != without), default=0.0)


@dataclass
class Figures:
    """What a run has shown."""

    account: Account
    redis_cpu: dict[str, float]
    """Processor seconds of each server."""
    worker_cpu: float
    """Processor seconds of all processes of the workers, for each second of the run."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fleet.streams", description=__doc__)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--streams", type=int, default=0, help="concurrent streams; 0: as many as the workers have slots"
    )
    parser.add_argument("--step-seconds", type=float, default=0.4, help="how long a step of the engine sleeps")
    parser.add_argument(
        "--tokens", type=int, default=40, help="mean length; each answer has half to one and a half times as many"
    )
    options = parser.parse_args()
    names = [f"s{number + 1}" for number in range(options.servers)]
    many, one = run(options, names), run(options, [])
    Console(width=120).print(_table(options, names, many, one))
    problems = [*many.account.problems, *one.account.problems]
    gap = many.account.longest_gap(KILLED, BACK, names[0])
    if gap > LONGEST_GAP:
        problems.append(f"a stream of another server was silent for {gap:.2f} s, more than {LONGEST_GAP} s")
    sys.exit("; ".join(problems[:5]) or 0)


def run(options: argparse.Namespace, names: list[str]) -> Figures:
    """Run the fleet.

    Args:
        names: the stream servers; none: all streams are on the server of the queue.
    """
    with sleeping_service(options.step_seconds) as service, ExitStack() as stack:
        servers = {
            name: stack.enter_context(make_server(appendonly=True)) for name in ([*names, "added"] if names else [])
        }
        urls = ",".join(f"{name}={server.url}" for name, server in servers.items())
        settings = BrokerSettings(service.url, stream_urls=urls)
        service.start_workers(options.workers, slots=SLOTS, stream_urls=urls)
        if names:
            with StreamServers.connected(service.client, *settings.stream_servers) as clients:
                StreamTableEditor(clients).enable(names)
        before, began = worker_cpu_seconds(service), time.monotonic()
        gc.disable()  # a collection of all that the account holds would stop the readers for a second
        try:
            account, redis_cpu = asyncio.run(_load(service, settings, servers, names, options))
        finally:
            gc.enable()
        spent = (worker_cpu_seconds(service) - before) / (time.monotonic() - began)
    return Figures(account, redis_cpu, spent)


def _table(options: argparse.Namespace, names: list[str], many: Figures, one: Figures) -> Table:
    title = f"{options.workers} workers, {options.streams or options.workers * SLOTS} streams at once"
    table = Table("what", f"{len(names)} stream servers", "one server for everything", title=title)

    def row(what: str, show: Callable[[Figures], str]) -> None:
        table.add_row(what, show(many), show(one))

    row("requests", lambda each: str(each.account.ended))
    row("chunks", lambda each: str(each.account.chunks))
    row("missing, doubled or failed", lambda each: str(len(each.account.problems)))
    row("gap between chunks p50, s", lambda each: f"{percentile(each.account.quiet_gaps, 50):.2f}")
    row("gap between chunks p99, s", lambda each: f"{percentile(each.account.quiet_gaps, 99):.2f}")
    row("longest gap before a server is killed, s", lambda each: f"{max(each.account.quiet_gaps, default=0.0):.2f}")
    away = many.account.longest_gap(KILLED, BACK, names[0])
    verdict = "holds" if away <= LONGEST_GAP else "fails"
    table.add_row(f"longest gap on other servers while {names[0]} is away, s", f"{away:.2f}: {verdict}", "")
    changed = many.account.longest_gap(BACK + 5, math.inf, names[0])
    table.add_row("longest gap there while a server is added and one is drained, s", f"{changed:.2f}", "")
    for name in many.redis_cpu:
        shown = [f"{each.redis_cpu[name]:.2f}" if name in each.redis_cpu else "" for each in (many, one)]
        table.add_row(f"Redis CPU of {name}, s", *shown)
    row("Redis CPU of all, s", lambda each: f"{sum(each.redis_cpu.values()):.2f}")
    row(f"processors that all workers use, of {os.cpu_count()}", lambda each: f"{each.worker_cpu:.2f}")
    return table


async def _load(
    service: SleepingService,
    settings: BrokerSettings,
    servers: dict[str, EmbeddedServer],
    names: list[str],
    options: argparse.Namespace,
) -> tuple[Account, dict[str, float]]:
    clients = {"the queue's server": service.client, **{name: connect(server.url) for name, server in servers.items()}}
    before = {name: cpu_seconds(client) for name, client in clients.items()}
    async with AsyncClient(settings, model="tiny") as client, _hub(settings) as (hub, streams):
        account = Account()
        count = options.streams or options.workers * SLOTS
        readers = [asyncio.create_task(_read_on(client, hub, streams, account, options)) for _ in range(count)]
        if names:
            with StreamServers.connected(service.client, *settings.stream_servers) as sync:
                lost = await _disturb(servers, names, StreamTableEditor(sync), account)
        await asyncio.gather(*readers)
    cpu = {name: cpu_seconds(each) - before[name] for name, each in clients.items()}
    if names:
        cpu[names[0]] = cpu_seconds(clients[names[0]]) + lost - before[names[0]]
    return account, cpu


async def _disturb(
    servers: dict[str, EmbeddedServer], names: list[str], editor: StreamTableEditor, account: Account
) -> float:
    """Kill, start, add and drain at their times. Returns the processor time of the killed process."""

    async def at(seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds - account.seconds))

    await at(KILLED)
    with connect(servers[names[0]].url) as client:
        spent = cpu_seconds(client)
    servers[names[0]].kill()
    await at(BACK)
    await asyncio.to_thread(servers[names[0]].start)
    await at(ADDED)
    await asyncio.to_thread(editor.add, "added")
    await at(DRAINED)
    await asyncio.to_thread(editor.drain, names[1])
    return spent


@asynccontextmanager
async def _hub(settings: BrokerSettings) -> AsyncIterator[tuple[StreamHub, AsyncStreamServers]]:
    main = connect_async(settings.redis_url)
    streams = AsyncStreamServers.connected(main, *settings.stream_servers)
    hub = StreamHub(streams, max_outage_seconds=60)
    try:
        yield hub, streams
    finally:
        await hub.aclose()
        await streams.aclose()
        await main.aclose()


async def _read_on(
    client: AsyncClient, hub: StreamHub, streams: AsyncStreamServers, account: Account, options: argparse.Namespace
) -> None:
    """Send one request after another and read each to its end.

    Their lengths differ. Otherwise all streams would end, and all requests would be sent, in the same moments.
    """
    while account.seconds < options.seconds:
        tokens = random.randint(options.tokens // 2, options.tokens * 3 // 2)
        request_id = await client.submit("the wheel", {"max_tokens": tokens, "ignore_eos": True})
        [home, *_] = await streams.homes(request_id)
        offset, chunk_at = 0, 0.0
        async with hub.subscribe({request_id: None}) as subscription:
            while subscription.request_ids:
                for _, event in await subscription.take(None):
                    now = account.seconds
                    if isinstance(event, ChunkEvent):
                        if event.offset != offset + len(event.token_ids):
                            account.problems.append(f"{request_id}: {event.entry_id} after {offset} tokens")
                        if chunk_at:
                            account.gaps.append((now, now - chunk_at, home))
                        offset, chunk_at = event.offset, now
                        account.chunks += 1
                    elif isinstance(event, EndEvent):
                        account.ended += 1
                        if event.error is not None or event.tokens != tokens:
                            account.problems.append(f"{request_id} ended after {event.tokens} tokens: {event.error}")
                    elif isinstance(event, Exception):
                        account.problems.append(f"{request_id}: {event}")


if __name__ == "__main__":
    main()
