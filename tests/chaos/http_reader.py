"""`HttpReader`: a client of the gateways that loses its connection and rejoins its stream, at any replica."""

import contextlib
import http.client
import json
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

_RETRY_SECONDS = 0.05
_PATH = "/v1/completions"


@dataclass
class TextChoice:
    """One choice as its chunks add up."""

    text: str = ""
    token_logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


class HttpReader:
    """Sends one request and reads its stream on a thread of its own, until [DONE].

    The request is sent again under its idempotency key while no answer has begun. From the first event on, a lost
    connection is followed by a rejoin with the last event's id, at a replica chosen at random.

    Args:
        ports: of the gateways that may be there.
        body: of a streamed completion.
    """

    def __init__(self, ports: Callable[[], Sequence[int]], body: dict[str, Any], seed: int) -> None:
        self.choices: dict[int, TextChoice] = {}
        self.error: dict[str, Any] | None = None
        self.is_done = False
        self.is_lost = False
        """Whether the answer was that the stream was lost with its server."""
        self.num_rejoins = 0
        self.problems: list[str] = []
        self._ports = ports
        self._body = json.dumps({**body, "stream": True})
        self._draw = random.Random(seed)
        self._idempotency_key = uuid.UUID(int=self._draw.getrandbits(128)).hex
        self._id: str | None = None
        self._cursor: str | None = None
        self._seen: set[str] = set()
        self._socket: socket.socket | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="http-reader", daemon=True)
        self._thread.start()

    @property
    def request_id(self) -> str | None:
        """None until the first event."""
        return self._id

    def cut(self) -> None:
        """Break the connection from the client's side."""
        connected = self._socket
        if connected is not None:
            with contextlib.suppress(OSError):  # it may be closed already
                connected.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        self._stopped.set()
        self.cut()
        self._thread.join(timeout=30)

    def _run(self) -> None:
        while not self._stopped.is_set() and not self.is_done:
            with contextlib.suppress(OSError, http.client.HTTPException):  # the replica is away, or it was cut
                self._read_once()
            if not self.is_done:
                self.num_rejoins += self._cursor is not None
                time.sleep(_RETRY_SECONDS)

    def _read_once(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._draw.choice(self._ports()), timeout=20)
        try:
            connection.connect()
            self._socket = connection.sock
            self._ask(connection)
            response = connection.getresponse()
            if response.status >= 500 or response.status == 429:
                self.is_lost = b'"stream_lost"' in response.read()
                if self.is_lost:  # before the first event; asked again, the answer would be the same
                    self._stopped.set()
                return  # Redis is away, or the queue is full: asked again
            if response.status != 200:
                self.problems.append(f"HTTP {response.status}: {response.read(300)!r}")
                self._stopped.set()
                return
            for cursor, data in _events(response):
                self._take(cursor, data)
        finally:
            self._socket = None
            connection.close()

    def _ask(self, connection: http.client.HTTPConnection) -> None:
        if self._cursor is None:
            headers = {"Content-Type": "application/json", "Idempotency-Key": self._idempotency_key}
            # the workers' clocks are hours apart, and each judges by its own what has expired
            headers |= {"X-Headrace-Resume": "1", "X-Headrace-Expires": "86400"}
            connection.request("POST", _PATH, self._body, headers)
        else:
            path = f"{_PATH}/{self._id}?stream=true"
            connection.request("GET", path, headers={"Last-Event-ID": self._cursor, "Accept": "text/event-stream"})

    def _take(self, cursor: str | None, data: str) -> None:
        if data == "[DONE]":
            self.is_done = True
            return
        chunk = json.loads(data)
        if cursor is None:
            return  # a ping
        if cursor in self._seen:
            self.problems.append(f"the event {cursor} came twice")
        self._seen.add(cursor)
        self._cursor = cursor
        if chunk.get("error"):
            self.error = chunk["error"]
            return
        self._id = chunk["id"]
        for part in chunk["choices"]:
            choice = self.choices.setdefault(part["index"], TextChoice())
            choice.text += part["text"]
            choice.token_logprobs += (part.get("logprobs") or {}).get("token_logprobs") or []
            choice.finish_reason = part.get("finish_reason") or choice.finish_reason


def _events(response: http.client.HTTPResponse) -> Iterator[tuple[str | None, str]]:
    """The id and the data of each event that has come whole; what a cut leaves of the last one is not an event."""
    cursor: str | None = None
    data: list[str] = []
    for raw in response:
        line = raw.decode()
        if not line.endswith("\n"):
            return
        line = line.rstrip("\n")
        name, _, value = line.partition(": ")
        if name == "id":
            cursor = value
        elif name == "data":
            data.append(value)
        elif not line:
            if data:
                yield cursor, "\n".join(data)
            cursor, data = None, []
