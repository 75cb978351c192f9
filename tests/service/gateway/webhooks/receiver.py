"""`Receiver`: a real HTTP or HTTPS server on loopback that answers webhooks as the test says, well or badly."""

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

PATIENCE = 60.0
"""Seconds; only a failing test takes all of it."""

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True)
class Received:
    """One POST."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def event(self) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(self.body)
        return event


def status(code: int, *headers: str, body: bytes = b"") -> Answer:
    """An answer with this status."""
    lines = [f"HTTP/1.1 {code} X", f"content-length: {len(body)}", *headers, "", ""]

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write("\r\n".join(lines).encode() + body)
        await writer.drain()

    return answer


async def hang(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    """Send nothing until the sender disconnects."""
    await reader.read()


async def reset(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def nonsense(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x00\x01 no HTTP\r\n\r\n")
    await writer.drain()


async def endless_headers(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 X\r\n")
    while not writer.transport.is_closing():
        writer.write(b"x-more: " + b"x" * 1000 + b"\r\n")
        await writer.drain()


def endless_body(code: int, sent: list[int] | None = None) -> Answer:
    """An endless body. `sent` gets the size of each part that was written."""

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {code} X\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        while not writer.transport.is_closing():
            writer.write(b"1000\r\n" + bytes(0x1000) + b"\r\n")
            await writer.drain()
            if sent is not None:
                sent.append(0x1000)

    return answer


class Receiver:
    """Responses are taken from `answers` in turn, then `default`."""

    def __init__(self, *answers: Answer, default: Answer | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.answers = list(answers)
        self.default = default or status(204)
        self.received: list[Received] = []
        self._tls = tls
        self._open: set[asyncio.StreamWriter] = set()
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> "Receiver":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.url = f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self.port}/hook?token=hidden"
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._server.close()
        for writer in self._open:
            writer.transport.abort()

    async def wait_for(self, count: int) -> list[Received]:
        """Wait until that many have arrived."""
        async with asyncio.timeout(PATIENCE), self._changed:
            await self._changed.wait_for(lambda: len(self.received) >= count)
        return list(self.received)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            body = await reader.readexactly(int(headers["content-length"]))
            answer = self.answers.pop(0) if self.answers else self.default
            async with self._changed:
                self.received.append(Received(head[0].split()[1], headers, body))
                self._changed.notify_all()
            await answer(reader, writer)
        except (OSError, asyncio.IncompleteReadError, ssl.SSLError):
            pass
        finally:
            self._open.discard(writer)
            writer.close()
