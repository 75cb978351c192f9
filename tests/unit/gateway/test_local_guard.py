"""Which requests of other web sites, and of its own callers, a gateway without keys accepts."""

from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message

from headrace_gateway.http.local_guard import LocalGuard


async def status(
    method: str = "GET", *, origins: tuple[str, ...] = (), path: str = "/v1/models", **headers: str
) -> int:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    raw = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope: dict[str, Any] = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": raw,
        "query_string": b"",
    }
    await LocalGuard(PlainTextResponse("served"), origins)(scope, receive, send)
    return int(sent[0]["status"])


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "LOCALHOST:8000", "127.0.0.1:8000", "127.1.2.3", "[::1]:8000", "[::1]"]
)
async def test_names_of_this_machine_are_served(host: str) -> None:
    assert await status(host=host) == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "evil@localhost.x"),
        *("0.0.0.0:8000", "10.0.0.1", "[::2]", "[", "127.0.0.1:8000:x.evil", "é"),
    ],
)
async def test_dns_rebinding_is_refused(host: str) -> None:
    assert await status(host=host) == 403


async def test_a_request_without_a_host_header_is_not_from_a_browser() -> None:
    assert await status() == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:8001", "https://localhost:8000"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
async def test_pages_of_other_origins_are_refused(origin: str, method: str) -> None:
    assert await status(method, host="localhost:8000", origin=origin, content_type="application/json") == 403


async def test_the_gateways_own_page_is_served() -> None:
    answered = await status(
        "POST", host="localhost:8000", origin="http://localhost:8000", content_type="application/json"
    )
    assert answered == 200


async def test_an_allowed_origin_is_served_and_its_host_is_a_name_of_the_gateway() -> None:
    origins = ("https://chat.example", "http://127.0.0.1:8001")
    for origin in origins:
        assert await status(origins=origins, host="localhost", origin=origin) == 200
    assert await status(origins=origins, host="chat.example") == 200
    assert await status(origins=origins, host="chat.example:444") == 403


async def test_with_all_origins_allowed_nothing_is_refused() -> None:
    assert await status("POST", origins=("*",), host="a.example", origin="https://b.example") == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=application/json", ""]
)
async def test_another_site_cannot_post_without_a_preflight_request(kind: str) -> None:
    assert await status("POST", host="localhost", content_type=kind) == 415


async def test_an_sdk_cancels_by_a_post_without_a_body() -> None:
    assert await status("POST", host="localhost", path="/v1/batches/b/cancel", content_length="0") == 200
    assert (
        await status("POST", host="localhost", path="/v1/responses/resp_1/cancel", sec_fetch_site="cross-site") == 415
    )
    assert await status("POST", host="localhost", content_length="2") == 415
    assert await status("POST", host="localhost", transfer_encoding="chunked") == 415


async def test_json_with_a_character_set_may_be_posted() -> None:
    assert await status("POST", host="localhost", content_type="Application/JSON; charset=utf-8") == 200


async def test_a_page_of_another_site_cannot_upload_a_file() -> None:
    form = {"host": "localhost", "content_type": "multipart/form-data; boundary=x", "path": "/v1/files"}
    assert await status("POST", **form) == 200
    assert await status("POST", **form, sec_fetch_site="same-origin") == 200
    assert await status("POST", **form, sec_fetch_site="cross-site") == 415
    assert await status("POST", **form, origin="https://evil.example") == 403
    allowed = {"origins": ("https://chat.example",), "origin": "https://chat.example", "sec_fetch_site": "cross-site"}
    assert await status("POST", **form, **allowed) == 200
    assert await status("POST", **{**form, "path": "/v1/completions"}, **allowed) == 415
