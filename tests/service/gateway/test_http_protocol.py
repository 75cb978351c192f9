"""What a gateway answers to a client that is slow, silent or malformed, and when it closes the connection."""

import json
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from headrace_broker.server.embedded import EmbeddedServer
from service.gateway.gateway_process import PATIENCE, GatewayProcess
from service.gateway.in_process import write_keys
from service.servers import make_server

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with make_server() as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gateway")


@pytest.fixture(scope="module")
def authorized(folder: Path) -> bytes:
    """The header of a valid key."""
    return b"Authorization: Bearer %b\r\n" % write_keys(folder / "keys", "web")["web"].encode()


@pytest.fixture(scope="module")
def gateway(server: EmbeddedServer, folder: Path, authorized: bytes) -> Iterator[GatewayProcess]:
    """A gateway with short time-outs."""
    gateway = GatewayProcess(
        redis_url=server.url, log=folder / "log", keys=folder / "keys", head_timeout=0.5, body_timeout=0.5
    ).wait_ready()
    try:
        yield gateway
    finally:
        gateway.close()


def answer(gateway: GatewayProcess, *sent: bytes) -> tuple[int, Any]:
    """Send, read until the gateway closes the connection, and return the status and the error."""
    with closing(socket.create_connection(("127.0.0.1", gateway.port), PATIENCE)) as connection:
        for data in sent:
            connection.sendall(data)
        received = b""
        while data := connection.recv(65536):
            received += data
            head, _, body = received.partition(b"\r\n\r\n")
            if body.endswith(b"}"):
                break  # it closes the connection when we do, or after a while
    assert b"connection: close" in head.lower(), received
    status = int(head.split()[1])
    return status, json.loads(body)["error"]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (CHUNKED + b"Content-Length: 5\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"Transfer-Encoding: gzip\r\n\r\n", 501),
        (CHUNKED + b"\r\nzz\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"a: b\r\n" * 20_000, 431),
        (b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"a: b\r\n" * 20_000 + b"\r\n", 431),
        (CHUNKED + b"\r\n" + b"1\r\na\r\n" * 100_000, 400),
    ],
    ids=["no HTTP", "two lengths", "gzip", "chunk", "endless head", "large head", "tiny chunks"],
)
def test_what_is_not_http_gets_openais_error_and_the_connection_is_closed(
    gateway: GatewayProcess, authorized: bytes, sent: bytes, status: int
) -> None:
    found, error = answer(gateway, sent.replace(b"Host: a\r\n", b"Host: a\r\n" + authorized, 1))
    assert (found, error["code"], error["type"]) == (status, "invalid_http", "invalid_request_error")
    assert gateway.get("/health") == 200


def test_ordinary_chunks_are_read(gateway: GatewayProcess, authorized: bytes) -> None:
    body = b"".join(b"1\r\n%c\r\n" % each for each in b'{"model": "nobody", "messages": []}')
    sent = CHUNKED + authorized + b"Connection: close\r\n\r\n" + body + b"0\r\n\r\n"
    assert answer(gateway, sent)[0] == 404


def test_a_body_without_a_key_is_not_parsed(gateway: GatewayProcess) -> None:
    """The chunks are no HTTP, but nothing after the 401 is parsed."""
    num_before = gateway.log_text().count("Invalid HTTP")
    with closing(socket.create_connection(("127.0.0.1", gateway.port), PATIENCE)) as connection:
        connection.sendall(CHUNKED + b"\r\n")
        assert b" 401 " in connection.recv(65536)
        connection.sendall(b"zz\r\n" * 100_000)
    assert gateway.get("/health") == 200
    assert gateway.log_text().count("Invalid HTTP") == num_before


@pytest.mark.parametrize("sent", [b"", b"GET /health HT"], ids=["silent", "slow head"])
def test_a_connection_without_a_request_is_closed(gateway: GatewayProcess, sent: bytes) -> None:
    with closing(socket.create_connection(("127.0.0.1", gateway.port), PATIENCE)) as connection:
        connection.sendall(sent)
        assert connection.recv(1) == b""


def test_a_body_that_stops_is_refused(gateway: GatewayProcess, authorized: bytes) -> None:
    length = b"Content-Length: 100000\r\n" + authorized + b"\r\n"
    status, error = answer(gateway, HEAD + length + b" " * 10)
    assert (status, error["code"]) == (408, "body_timeout")
