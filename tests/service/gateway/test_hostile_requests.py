"""Malformed and hostile requests on real sockets: each gets a response, and the gateway keeps serving."""

import http.client
import json
from typing import Any

import pytest

from service.gateway.conftest import RunningGateway

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
GOOD = b'{"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]'


def answer(
    gateway: RunningGateway, method: str, path: str, body: bytes | None = None, headers: dict[str, str] = JSON
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.replicas[0].port, timeout=60)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "code"),
    [
        ("POST", CHAT, b'{"a": ' + b"[" * 2000 + b"]" * 2000 + b"}", JSON, 400, "invalid_json"),
        ("POST", CHAT, b'{"a": "\\ud800"}', JSON, 400, "invalid_json"),
        ("POST", CHAT, b'{"a": 1e999}', JSON, 400, "invalid_json"),
        ("POST", CHAT, GOOD + b', "seed": ' + b"9" * 4000 + b"}", JSON, 400, "invalid_request"),
        ("POST", CHAT, GOOD + b', "model": "nobody"}', JSON, 404, "model_not_found"),
        ("POST", CHAT, b"{}", {"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
        ("POST", CHAT, b"{}", {**JSON, "Content-Encoding": "gzip"}, 415, "unsupported_media_type"),
        ("POST", "/v1/audio/speech", b"{}", JSON, 404, "not_found"),
        ("POST", "/v1/embeddings", b"{}", JSON, 400, "invalid_request"),
        ("PUT", CHAT, b"{}", JSON, 405, "method_not_allowed"),
        ("GET", CHAT, None, {}, 405, "method_not_allowed"),
        ("GET", f"{CHAT}/chatcmpl-0", None, {}, 404, "not_found"),
        (
            "POST",
            "/v1/completions",
            b'{"model": "tiny", "prompt": "x", "structured_outputs": {"choice": ["a"]}, "allowed_token_ids": [7]}',
            JSON,
            400,
            "invalid_request",
        ),
    ],
)
def test_each_gets_its_status_and_openais_error(
    gateway: RunningGateway,
    method: str,
    path: str,
    body: bytes | None,
    headers: dict[str, str],
    status: int,
    code: str,
) -> None:
    found, told = answer(gateway, method, path, body, headers)
    assert set(told) == {"error"}, told
    assert set(told["error"]) == {"message", "type", "param", "code"}
    assert (found, told["error"]["code"]) == (status, code), told
    assert answer(gateway, "POST", CHAT, GOOD + b"}")[0] == 200


def test_a_body_of_ten_mebibytes_is_refused_before_it_has_arrived(gateway: RunningGateway) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.replicas[0].port, timeout=60)
    connection.putrequest("POST", CHAT)
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(10 * 2**20))
    connection.endheaders()
    response = connection.getresponse()
    assert response.status == 413
    assert json.loads(response.read())["error"]["code"] == "request_too_large"
    connection.close()


def test_a_chunked_body_of_ten_mebibytes_is_refused_before_it_has_ended(gateway: RunningGateway) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.replicas[0].port, timeout=60)
    connection.putrequest("POST", CHAT)
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    for _ in range(4):
        connection.send(b"100000\r\n" + b" " * 2**20 + b"\r\n")
    connection.send(b"1\r\n \r\n")
    response = connection.getresponse()
    assert response.status == 413
    connection.close()


def test_an_answer_is_found_under_its_own_path_only(gateway: RunningGateway) -> None:
    _, made = answer(gateway, "POST", CHAT, GOOD + b"}")
    assert answer(gateway, "GET", f"{CHAT}/{made['id']}", headers={}) == (200, made)
    status, told = answer(gateway, "GET", f"/v1/completions/{made['id']}", headers={})
    assert (status, told["error"]["code"]) == (404, "not_found")
    for headers in ({"Last-Event-ID": "soon"}, {"X-Headrace-Resume": "maybe"}):
        path = f"{CHAT}/{made['id']}?starting_after=1-0.0"
        assert answer(gateway, "GET", path, headers=headers)[0] == 400
