"""Bodies of requests: which are parsed as JSON, and which are refused with which status."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import Message

from headrace_gateway.errors import ApiError
from headrace_gateway.requests.body import read_json

JSON = "application/json"


async def read(parts: bytes | Sequence[bytes], *, max_bytes: int = 1000, cut: bool = False, **headers: str) -> Any:
    """Return the parsed body. `cut`: the client disconnects before the end of the body."""
    parts = [parts] if isinstance(parts, bytes) else list(parts)
    messages: list[Message] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages.append({"type": "http.disconnect"} if cut else {"type": "http.request", "body": b"", "more_body": False})
    waiting = iter(messages)

    async def receive() -> Message:
        return next(waiting)

    named: Iterable[tuple[str, str]] = {"content_type": JSON, **headers}.items()
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in named]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": raw, "query_string": b""}
    return await read_json(Request(scope, receive), max_bytes)


async def refusal(parts: bytes | Sequence[bytes], **options: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        await read(parts, **options)
    assert raised.value.kind == "invalid_request_error"
    return raised.value


async def test_an_object_is_read_in_pieces() -> None:
    assert await read([b'{"a"', b": [1, 2.5, ", b'"\\u00e9\xc3\xa9"]}']) == {"a": [1, 2.5, "éé"]}
    assert await read(b"{}", content_type="Application/JSON; charset=utf-8") == {}
    assert await read(b"{}", content_encoding="identity") == {}


async def test_large_integers_stay_exact() -> None:
    assert await read(b'{"seed": 9007199254740993}') == {"seed": 9007199254740993}


async def test_the_last_value_of_a_repeated_name_counts() -> None:
    assert await read(b'{"a": 1, "a": 2}') == {"a": 2}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"5",
        b"{",
        b"{} {}",
        b"{'a': 1}",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": 1e999}',
        b'{"a": ' + b"1" * 5000 + b"}",
        b'{"a": "\\ud800"}',
        b'{"a": "\xff"}',
        b'{"\\udc00": 1}',
        b"\xef\xbb\xbf{}",
        b'{"a": "\x00"}',
        b'{"a": ' + b"[" * 2000 + b"]" * 2000 + b"}",
        b'{"a":' * 2000 + b"1" + b"}" * 2000,
        b"[" * 9999,
    ],
)
async def test_a_body_that_is_not_a_strict_json_object_is_refused(body: bytes) -> None:
    error = await refusal(body, max_bytes=100_000)
    assert (error.status, error.code) == (400, "invalid_json")


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x" * 999]
)
async def test_another_content_type_is_refused(kind: str) -> None:
    error = await refusal(b"{}", content_type=kind)
    assert (error.status, error.code) == (415, "unsupported_media_type")
    assert len(error.message) < 200


async def test_a_compressed_body_is_refused() -> None:
    error = await refusal(b"{}", content_encoding="gzip")
    assert (error.status, error.code) == (415, "unsupported_media_type")


async def test_a_body_is_bounded_with_and_without_a_length() -> None:
    body = b'{"a": "%b"}' % (b"x" * 992)
    assert len(body) == 1001
    for error in (
        await refusal(body),
        await refusal([body[:500], body[500:]]),
        await refusal(b"", content_length="1001"),
        await refusal(b"", content_length="9" * 5000),
    ):
        assert (error.status, error.code) == (413, "request_too_large")
        assert error.headers == {"connection": "close"}  # the rest of it is not read
    assert await read(body.replace(b"x", b"", 1)) == {"a": "x" * 991}


async def test_an_endless_body_is_not_buffered() -> None:
    def endless() -> Iterable[bytes]:
        for _ in range(11):
            yield b" " * 100
        raise AssertionError("it was read on")

    waiting = iter(endless())

    async def receive() -> Message:
        return {"type": "http.request", "body": next(waiting), "more_body": True}

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-type", JSON.encode())]}
    with pytest.raises(ApiError) as raised:
        await read_json(Request(scope, receive), 1000)
    assert raised.value.status == 413


async def test_a_broken_connection_is_not_a_server_error() -> None:
    assert (await refusal(b'{"a": ', cut=True)).status == 400


@settings(deadline=None)
@given(st.one_of(st.binary(max_size=60), st.text(max_size=40).map(str.encode)))
async def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    try:
        found = await read(body)
    except ApiError as error:
        found = error.status
    assert found == 400 or isinstance(found, dict)
