"""The cost of open, silent streams in one gateway process: its memory and its share of a processor.

    python benchmarks/gateway_streams.py [--streams 1000] [--seconds 30]

No model runs: this script claims each request as a worker does, and publishes one token. Then all streams are silent.
The exit status is 1 if the process takes more memory than --max-mib.
"""

import argparse
import asyncio
import contextlib
import resource
import sys
import tempfile
import time
from pathlib import Path

import psutil

import command_line
from gateway_cost import events_of
from headrace_broker.models.registry import register_model
from headrace_broker.server.connections import connect
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.streams.writer import StreamWrite, StreamWriter
from headrace_cli.local.process import LocalGateway

_OPENED_AT_ONCE = 50
_PATIENCE = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=command_line.count, default=1000)
    parser.add_argument("--seconds", type=command_line.count, default=30, help="of silence")
    parser.add_argument("--max-mib", type=command_line.count, default=200, help="of the process, resident")
    args = parser.parse_args()
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # the gateway inherits the limit
    with (
        EmbeddedServer(environ={}) as server,
        tempfile.TemporaryDirectory() as folder,
        LocalGateway(redis_url=server.url, log=Path(folder) / "gateway.log") as gateway,
    ):
        register_model(connect(server.url), "tiny", max_model_len=99, worker="w", seen=time.time())
        gateway.wait_ready()
        process = psutil.Process(gateway.pid)
        before = process.memory_info().rss
        opening, share, after = asyncio.run(_measure(gateway, server.url, process, args.streams, args.seconds))
    mib, mib_before = after / 2**20, before / 2**20
    print(f"{args.streams} open streams on one gateway")
    each = 1024 * (mib - mib_before) / args.streams
    print(f"resident: {mib:.0f} MiB, {mib_before:.0f} without streams, {each:.0f} KiB each")
    print(f"processor: {1000 * opening / args.streams:.1f} ms to open one, {share:.1%} while nothing comes")
    return 1 if mib > args.max_mib else 0


async def _measure(
    gateway: LocalGateway, redis_url: str, process: psutil.Process, streams: int, seconds: int
) -> tuple[float, float, int]:
    """Return the processor seconds for opening all streams, the processor share after that, and the final memory."""
    used_at_first = _used(process)
    worker = asyncio.create_task(_as_a_worker(redis_url))
    started: asyncio.Queue[None] = asyncio.Queue()
    readers = []
    try:
        async with asyncio.timeout(_PATIENCE):
            for number in range(streams):
                readers.append(asyncio.create_task(_read(gateway, started)))
                if number >= _OPENED_AT_ONCE:
                    await started.get()
            for _ in range(min(streams, _OPENED_AT_ONCE)):
                await started.get()
        used_before, begun = _used(process), time.monotonic()
        await asyncio.sleep(seconds)
        used = _used(process) - used_before
        assert not any(reader.done() for reader in readers), "a stream was cut"
        return used_before - used_at_first, used / (time.monotonic() - begun), process.memory_info().rss
    finally:
        for task in (worker, *readers):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(worker, *readers)


def _used(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def _read(gateway: LocalGateway, started: asyncio.Queue[None]) -> None:
    body = {"model": "tiny", "prompt": [1, 2, 3], "stream": True}
    async for _ in events_of(gateway.host, gateway.port, "/v1/completions", body):
        started.put_nowait(None)


async def _as_a_worker(redis_url: str) -> None:
    client = connect(redis_url)
    writer = StreamWriter(client, 600)
    claimed: set[str] = set()
    while True:
        new = {key.decode().rpartition(":")[2] for key in client.keys("headrace:listener:*")} - claimed
        claimed |= new
        for request_id in new:
            writer.claim(request_id, "w", abandon_after=30.0, prompt_tokens=3)
        writer.publish(StreamWrite.chunk(each, 1, 1, index=0, token_ids=[1], text="a") for each in new)
        await asyncio.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
