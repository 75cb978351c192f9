"""A large batch over HTTP beside chats: memory of the gateway and of Redis, and the chats' time to first token.

    python benchmarks/batch_beside_chat.py --model FOLDER [--lines 10000] [--seconds 3600] [--json FILE]

FOLDER is a small model, so lines end fast. One worker and one gateway serve the batch and a chat every half second.
The gateway's resident memory, Redis's `used_memory` and the progress are sampled each second; the table shows them at
tenths of the batch. The memory should stay flat: it must not depend on the size of the batch.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

import command_line
import runs
from gateway_cost import events_of
from headrace_broker.server.connections import connect
from headrace_cli.local.process import LocalGateway
from measurements import Setup, running_service

_CHAT_SECONDS = 0.5
_CHAT_TOKENS = 16
_LINE_TOKENS = 8
_TENTHS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--lines", type=command_line.count, default=10_000)
    parser.add_argument("--seconds", type=command_line.count, default=3600, help="the batch expires after so long")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    figures = asyncio.run(_measure(args.model, args.lines, args.seconds))
    report(figures)
    if args.json:
        runs.save(args.json, **figures)


async def _measure(model_folder: str, lines: int, seconds: int) -> dict[str, Any]:
    setup = Setup(model_folder, "float32", "mixed", 0.0, None, "auto")
    async with running_service(setup) as client:
        (model,) = await client.models()
        with (
            tempfile.TemporaryDirectory() as folder,
            LocalGateway(
                redis_url=client.settings.redis_url, log=Path(folder) / "gateway.log", files=f"{folder}/files"
            ) as gateway,
        ):
            await asyncio.to_thread(gateway.wait_ready)
            alone = [await _chat(gateway, model) for _ in range(20)]
            first_tokens: list[float] = []
            chatting = asyncio.create_task(_keep_chatting(gateway, model, first_tokens))
            try:
                samples, batch = await _follow(gateway, client, model, lines, seconds)
            finally:
                chatting.cancel()
                await asyncio.wait([chatting])
    return {
        "lines": lines,
        "seconds": samples[-1]["seconds"],
        "status": batch["status"],
        "request_counts": batch["request_counts"],
        "ttft_ms_alone": _summary(alone),
        "ttft_ms_beside": _summary(first_tokens),
        "samples": samples,
    }


async def _follow(
    gateway: LocalGateway, client: Any, model: str, lines: int, seconds: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Create the batch, and sample until it has ended."""
    batch = await asyncio.to_thread(_create, gateway, model, lines, seconds)
    process, redis = psutil.Process(gateway.pid), connect(client.settings.redis_url)
    samples: list[dict[str, Any]] = []
    started = time.perf_counter()
    with Console(stderr=True).status("") as status:
        while True:
            batch = await asyncio.to_thread(_call, gateway, "GET", f"/v1/batches/{batch['id']}")
            counts = batch["request_counts"]
            done = counts["completed"] + counts["failed"]
            used = (await asyncio.to_thread(redis.info, "memory"))["used_memory"]
            samples.append(
                {
                    "seconds": round(time.perf_counter() - started, 1),
                    "done": done,
                    "gateway_bytes": process.memory_info().rss,
                    "redis_bytes": used,
                }
            )
            status.update(f"{done} of {lines} lines, {batch['status']}")
            if batch["status"] in ("completed", "failed", "expired", "cancelled"):
                redis.close()
                return samples, batch
            await asyncio.sleep(1.0)


def _create(gateway: LocalGateway, model: str, lines: int, seconds: int) -> dict[str, Any]:
    parts = [b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n']
    parts.append(b'--x\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n')
    for number in range(lines):
        body = {"model": model, "prompt": [1 + number % 50, 2, 3, 4], "max_tokens": _LINE_TOKENS, "ignore_eos": True}
        line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        parts.append(json.dumps(line).encode() + b"\n")
    parts.append(b"\r\n--x--\r\n")
    kind = "multipart/form-data; boundary=x"
    file = _call(gateway, "POST", "/v1/files", b"".join(parts), kind)
    wanted = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": f"{seconds}s"}
    return _call(gateway, "POST", "/v1/batches", json.dumps(wanted).encode())


def _call(
    gateway: LocalGateway, method: str, path: str, body: bytes | None = None, kind: str = "application/json"
) -> dict[str, Any]:
    request = urllib.request.Request(  # our own address
        gateway.url + path, body, {"Content-Type": kind}, method=method
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


async def _keep_chatting(gateway: LocalGateway, model: str, first_tokens: list[float]) -> None:
    while True:
        first_tokens.append(await _chat(gateway, model))
        await asyncio.sleep(_CHAT_SECONDS)


async def _chat(gateway: LocalGateway, model: str) -> float:
    """Return the milliseconds until the first event of a stream. Read the stream to its end."""
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": _CHAT_TOKENS, "ignore_eos": True, "stream": True}
    started, first = time.perf_counter(), 0.0
    async for _ in events_of(gateway.host, gateway.port, "/v1/completions", body):
        first = first or 1000 * (time.perf_counter() - started)
    return first


def _summary(times: list[float]) -> dict[str, float]:
    if len(times) < 2:
        return {"count": len(times)}
    return {
        "count": len(times),
        "p50": round(statistics.median(times), 1),
        "p95": round(statistics.quantiles(times, n=20)[-1], 1),
    }


def report(figures: dict[str, Any]) -> None:
    title = f"{figures['lines']} lines in {figures['seconds']:.0f} s, {figures['status']}"
    table = Table(title=title, title_justify="left")
    for column in ("lines done", "seconds", "gateway MiB", "Redis MiB"):
        table.add_column(column, justify="right")
    samples = figures["samples"]
    for tenth in range(_TENTHS + 1):
        sample = next((each for each in samples if each["done"] >= figures["lines"] * tenth / _TENTHS), samples[-1])
        sizes = [f"{sample[name] / 2**20:.1f}" for name in ("gateway_bytes", "redis_bytes")]
        table.add_row(str(sample["done"]), str(sample["seconds"]), *sizes)
    console = Console()
    console.print(table)
    for name in ("alone", "beside"):
        console.print(f"ms to a chat's first token, {name}: {figures[f'ttft_ms_{name}']}")


if __name__ == "__main__":
    main()
