"""Many live subscribers in one process, each with its own connection. At the end it writes when each received what.

Reads lines `<request id> <0|1>` from stdin. A request marked 1 gets a subscriber of its own at once. The others are
divided among argv[2] subscribers, each of which takes the next request when its last one has ended. argv[1] is Redis's
URL. The file argv[3] gets {request id: [start, first chunk, end, tokens, error]}, with times in unix seconds.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

import redis

from headrace_broker.call_rules import BEGINNING
from headrace_broker.errors import StreamExpiredError
from headrace_broker.server.connections import connect_async
from headrace_broker.streams.events import ChunkEvent, EndEvent
from headrace_broker.streams.subscriber import read_stream_async

MAX_FAILURES = 100
"""The most connections that a subscriber may lose during one stream, half a second apart."""

Times = list[float | int | str | None]


async def follow(url: str, request_ids: "asyncio.Queue[str | None]", account: dict[str, Times]) -> None:
    """Follow one stream after another, as one subscriber."""
    client = connect_async(url)
    while (request_id := await request_ids.get()) is not None:
        started = first = None
        tokens = 0
        last_id = BEGINNING
        num_failures = 0
        while request_id not in account:
            try:
                async for event in read_stream_async(client, request_id, last_id=last_id):
                    now, last_id = time.time(), event.entry_id
                    if isinstance(event, ChunkEvent):
                        first = first or now
                        tokens += len(event.token_ids)
                    elif isinstance(event, EndEvent):
                        account[request_id] = [started, first, now, tokens, event.error.code if event.error else None]
                    else:
                        started = started or now
            except StreamExpiredError:
                account[request_id] = [started, first, time.time(), tokens, "stream_expired"]
            except (redis.ConnectionError, redis.TimeoutError):
                # the machine was too busy to read in time: read on after the last entry
                num_failures += 1
                if num_failures > MAX_FAILURES:
                    raise
                await asyncio.sleep(0.5)
    await client.aclose()


async def main(url: str, count: int, file: Path) -> None:
    account: dict[str, Times] = {}
    waiting: asyncio.Queue[str | None] = asyncio.Queue()
    subscribers = [asyncio.create_task(follow(url, waiting, account)) for _ in range(count)]
    stdin = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    while line := await stdin.readline():
        request_id, at_once = line.decode().split()
        if at_once == "1":
            own: asyncio.Queue[str | None] = asyncio.Queue()
            own.put_nowait(request_id)
            own.put_nowait(None)
            subscribers.append(asyncio.create_task(follow(url, own, account)))
        else:
            waiting.put_nowait(request_id)
    for _ in range(count):
        waiting.put_nowait(None)
    await asyncio.gather(*subscribers)
    file.write_text(json.dumps(account))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
