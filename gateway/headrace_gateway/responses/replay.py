"""Reads a response's state from the whole stream at once, without a subscriber heartbeat."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final

from headrace_broker import StreamEvent
from headrace_broker.keys import ended_key, stream_key
from headrace_broker.server.asking_homes import server_having
from headrace_broker.server.stream_servers import AsyncStreamServers
from headrace_broker.streams.events import read_entry
from headrace_gateway.answers.envelope import Envelope
from headrace_gateway.answers.reader import LATE_SECONDS
from headrace_gateway.responses.stream import ResponseStream

if TYPE_CHECKING:
    import redis.asyncio

_AT_ONCE: Final = 512
"""Entries that are read before other tasks get a turn."""


async def replay(streams: AsyncStreamServers, envelope: Envelope) -> ResponseStream | None:
    """Return a ResponseStream that has read all entries so far; None if the stream has expired."""
    client, name = await server_having(streams, envelope.id)
    stream = ResponseStream(envelope)
    has_entries = False
    async for event in _entries(client, stream_key(name)):
        has_entries = True
        stream.step(envelope.id, event)
    if has_entries:
        return stream
    if await client.exists(ended_key(name)):
        return None
    if time.time() > envelope.created + envelope.expires + LATE_SECONDS:
        stream.fail("expired", "no worker took the request before it expired")
    return stream


async def _entries(client: "redis.asyncio.Redis", key: str) -> AsyncIterator[StreamEvent]:
    after = "-"
    while True:
        entries: Any = await client.xrange(key, after, "+", count=_AT_ONCE)
        for entry_id, fields in entries:
            yield read_entry(entry_id, fields)
        if len(entries) < _AT_ONCE:
            return
        after = f"({entries[-1][0].decode()}"
        await asyncio.sleep(0)
