"""The processes of a recipe, what they answer, and what their requests have left in Redis."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import redis

T = TypeVar("T")
WAIT_SECONDS = 120.0


def until(found: Callable[[], T], what: str) -> T:
    """Ask repeatedly, and return the first answer that is true."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (answer := found()):
        if time.monotonic() > deadline:
            raise AssertionError(f"no {what} within {WAIT_SECONDS:g} s")
        time.sleep(0.05)
    return answer


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program of this environment with its output on standard error, and end it."""
    process = subprocess.Popen([sys.executable, "-m", *command], stdout=sys.stderr)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def served(app: str) -> Iterator[str]:
    """Serve an ASGI application by uvicorn, and yield its URL when it listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with running("uvicorn", app, "--host", "127.0.0.1", "--port", str(port), "--log-level", "warning") as process:

        def listens() -> bool:
            assert process.poll() is None, f"uvicorn ended with status {process.returncode}"
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        until(listens, f"server of {app}")
        yield f"http://127.0.0.1:{port}"


def events(response: Any) -> Iterator[dict[str, Any]]:
    """Yield the server-sent events of a response: `event`, `id` and decoded `data`. Comments are left out."""
    event: dict[str, Any] = {}
    for line in (raw.decode().rstrip("\n") for raw in response):
        name, _, value = line.partition(": ")
        if name in ("event", "id"):
            event[name] = value
        elif name == "data":
            event[name] = json.loads(value)
        elif not line and event:
            yield event
            event = {}


def answer(url: str, body: bytes | None = None, **headers: str) -> Any:
    """Open a URL; a body is posted."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return urllib.request.urlopen(urllib.request.Request(url, body, names), timeout=WAIT_SECONDS)


def status_of(url: str, body: bytes | None = None, **headers: str) -> int:
    try:
        return int(answer(url, body, **headers).status)
    except urllib.error.HTTPError as error:
        return error.code


class NewStreams:
    """The streams of requests that were sent after this object was made."""

    def __init__(self, redis_url: str) -> None:
        self.redis = redis.Redis.from_url(redis_url, protocol=2)
        self._before = self._keys()

    def _keys(self) -> set[bytes]:
        return set(self.redis.scan_iter("headrace:stream:*"))

    def ids(self) -> list[str]:
        return [key.decode().removeprefix("headrace:stream:") for key in self._keys() - self._before]

    def entries(self, request_id: str) -> list[tuple[str, bytes]]:
        """Return the types and the packed data of a stream's entries."""
        found: Any = self.redis.xrange(f"headrace:stream:{request_id}")
        return [(fields[b"type"].decode(), fields[b"data"]) for _, fields in found]
