"""Many live subscribers in one process, each on a connection of its own; says at the end when each got what.

Reads lines `<request id> <0|1>` from stdin. Requests marked 1 are followed at once; for the others there are as many
subscribers as argv[2] says, each of which takes the next request when its own has ended. Redis's URL is argv[1], and
the account goes to the file argv[3] as {request id: [start, first chunk, end, tokens, error]}, times in unix seconds.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

import redis

from headrace_broker.call_rules import BEGINNING
from headrace_broker.connections import connect_async
from headrace_broker.errors import StreamExpiredError
from headrace_broker.events import ChunkEvent, EndEvent
from headrace_broker.subscriber import read_stream_async

MOST_FAILURES = 100
"""Lost connections in the life of one stream, half a second apart, after which there is no server any more."""

Times = list[float | int | str | None]


async def follow(url: str, request_ids: "asyncio.Queue[str | None]", account: dict[str, Times]) -> None:
    """One subscriber."""
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
                # on a machine that is too busy to read in time: it comes back where it was
                num_failures += 1
                if num_failures > MOST_FAILURES:
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
