"""The cost of the gateway: HTTP streams through it, compared with streams read straight from the queue.

    python benchmarks/gateway_cost.py [--dtype float32] [--turns 5] [--json FILE]

One worker serves both sides in turns, because the speed of a machine drifts. Each turn sends the whole mixed workload
at once. After the turns, short requests are sent one by one, and their times to the first token are compared. This
process reads every token of both sides: from Redis over one connection, or from the gateway over one connection per
stream. Prefix caching is off, because every turn has the same prompts.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

import command_line
import runs
from headrace_cli.local.process import LocalGateway
from headrace_engine.checkpoints import default_model
from measurements import Setup, running_service, through_queue
from workload import BenchmarkRequest

_ALONE = BenchmarkRequest([1, 2, 3, 4] * 8, 1)
_REQUESTS_ALONE = 60
_SIDES = ("queue", "gateway")
_BESIDE_ENGINE = {
    "gateway": "the gateway",
    "reader": "this process, which reads",
    "worker": "the worker beside its engine",
    "redis": "Redis",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command_line.add_model_options(parser)
    parser.add_argument("--turns", type=command_line.count, default=5, help="of each on the whole workload")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    model = args.model or str(default_model.fetch(args.dtype))
    setup = Setup(model, args.dtype, "mixed", 0.0, args.quantization, args.kv_cache_dtype, enable_prefix_caching=False)
    figures = asyncio.run(_measure(setup, args.turns))
    report(figures, command_line.describe(args))
    if args.json:
        runs.save(args.json, **command_line.engine_options(args), **figures)


async def _measure(setup: Setup, turns: int) -> dict[str, Any]:
    kinds = ("tokens_per_second", "processor_seconds", "ttft_ms", *_BESIDE_ENGINE)
    figures: dict[str, Any] = {kind: {side: [] for side in _SIDES} for kind in kinds}
    requests = setup.requests()
    async with running_service(setup) as client, _gateway_of(client) as gateway:
        (model,) = await client.models()
        sides = {
            "queue": lambda requests: through_queue(client, requests),
            "gateway": lambda requests: through_gateway(gateway, model, requests),
        }
        beside = _beside_engine(gateway.pid)
        with Console(stderr=True).status("") as status:
            for turn in range(turns + 1):  # the first turn allocates memory and is not counted
                for name in sorted(sides, reverse=turn % 2 == 1):  # each goes first in turn
                    status.update(f"{name}, turn {turn} of {turns}")
                    used_before, started = _processor_seconds(beside), time.perf_counter()
                    await sides[name](requests)
                    seconds = time.perf_counter() - started
                    if turn:
                        used = {each: now - used_before[each] for each, now in _processor_seconds(beside).items()}
                        for each, own in {**used, "processor_seconds": sum(used.values())}.items():
                            figures[each][name].append(own)
                        figures["tokens_per_second"][name].append(sum(each.max_tokens for each in requests) / seconds)
            for _ in range(_REQUESTS_ALONE):
                for name, through in sides.items():
                    started = time.perf_counter()
                    await through([_ALONE])
                    figures["ttft_ms"][name].append(1000 * (time.perf_counter() - started))
    return figures


@asynccontextmanager
async def _gateway_of(client: Any) -> AsyncIterator[LocalGateway]:
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalGateway(redis_url=client.settings.redis_url, log=Path(folder) / "gateway.log") as gateway,
    ):
        await asyncio.to_thread(gateway.wait_ready)
        yield gateway


async def through_gateway(gateway: LocalGateway, model: str, requests: Sequence[BenchmarkRequest]) -> None:
    """Send all requests at once, each on its own connection, and read every stream to its end."""

    async def one(request: BenchmarkRequest) -> None:
        body = {"model": model, "prompt": request.prompt_token_ids, "stream": True, **request.sampling_params}
        num_chunks = 0
        async for _ in events_of(gateway.host, gateway.port, "/v1/completions", body):
            num_chunks += 1
        assert num_chunks > 1

    await asyncio.gather(*map(one, requests))


async def events_of(host: str, port: int, path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
    """Yield the data of each event of a stream. The code is minimal, because an SDK costs more than the gateway."""
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(
                f"the gateway answered {status.decode().strip()}: {(await reader.read()).decode()[-500:]}"
            )
        async for line in reader:
            if line.startswith(b"data: "):
                if line == b"data: [DONE]\n":
                    return
                yield line[6:]
        raise RuntimeError("the stream ended without [DONE]")
    finally:
        writer.close()


def _beside_engine(gateway_pid: int) -> dict[str, psutil.Process]:
    """Return the processes beside the engine: the worker's parent, Redis, the gateway and this process."""
    children = psutil.Process().children()
    (worker,) = (child for child in children if child.cmdline()[-1] == "worker")
    (server,) = (child for child in children if child.pid not in (worker.pid, gateway_pid))
    return {"gateway": psutil.Process(gateway_pid), "reader": psutil.Process(), "worker": worker, "redis": server}


def _processor_seconds(processes: Mapping[str, psutil.Process]) -> dict[str, float]:
    used = {name: process.cpu_times() for name, process in processes.items()}
    return {name: times.user + times.system for name, times in used.items()}


def report(figures: dict[str, Any], title: str) -> None:
    table = Table(title=f"mixed, {title}, medians, {os.cpu_count()} processors", title_justify="left")
    for column in ("", "queue client", "through the gateway", "median of pairs"):
        table.add_column(column, justify="right")

    def row(what: str, kind: str, digits: int, difference: str) -> None:
        direct, gateway = figures[kind]["queue"], figures[kind]["gateway"]
        # compare the pairs, measured one after the other: medians over all turns drift with the machine
        ratios = [there / here if here else 0.0 for here, there in zip(direct, gateway, strict=True)]
        added = statistics.median(there - here for here, there in zip(direct, gateway, strict=True))
        medians = [f"{statistics.median(each):.{digits}f}" for each in (direct, gateway)]
        table.add_row(what, *medians, difference.format(ratio=statistics.median(ratios), added=added))
        if kind == "tokens_per_second" and len(ratios) > 1:
            error = statistics.stdev(ratios) / len(ratios) ** 0.5
            table.add_row("the same, mean of pairs", "", "", f"{statistics.mean(ratios):.3f} ± {error:.3f} x")

    row("output tokens/s", "tokens_per_second", 1, "{ratio:.3f} x")
    row("processor seconds beside the engine's", "processor_seconds", 2, "{added:+.2f}")
    for kind, name in _BESIDE_ENGINE.items():
        row(f"of these, {name}", kind, 2, "{added:+.2f}")
    row("one request alone, ms to its only token", "ttft_ms", 1, "{added:+.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
