"""Authentication and access, and the headers and errors of every response."""

import asyncio
import json
import logging
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import redis
from starlette.routing import Route

from headrace_broker.keys import queue_lists
from headrace_broker.models.loading_models import report_loading
from headrace_broker.models.registry import register_model
from headrace_broker.server.embedded import EmbeddedServer
from headrace_gateway import GatewaySettings, GatewaySettingsError, make_app
from headrace_monitoring.gateway_metrics import GatewayMetrics
from service.gateway.gateway_process import GatewayProcess
from service.gateway.in_process import bearer, running_app, write_keys
from service.servers import make_server

PUBLIC = {"/health", "/ready", "/", "/page/{name}"}
JSON = {"Content-Type": "application/json"}


def error_of(response: httpx2.Response) -> dict[str, Any]:
    """Return the error in OpenAI's format."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


@pytest.fixture
async def anybody(redis_server: EmbeddedServer) -> AsyncIterator[httpx2.AsyncClient]:
    async with running_app(redis_server.url) as (_, client):
        yield client


async def test_no_endpoint_but_the_public_ones_answers_without_a_key(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    register_model(redis_client, "tiny", max_model_len=64, worker="w", seen=time.time())  # the gateway is ready
    write_keys(tmp_path / "keys", "web")
    async with running_app(redis_server.url, keys=tmp_path / "keys") as (app, client):
        routes = [route for route in app.routes if isinstance(route, Route)]
        assert {route.path for route in routes} >= {"/health", "/v1/models", "/v1/chat/completions"}
        for route in routes:
            for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "QUERY"):
                path = re.sub(r"\{[^}]*\}", "index.html", route.path)
                for headers in ({}, bearer("wrong"), {"Authorization": "Basic d2ViOg=="}, {"x-api-key": "wrong"}):
                    response = await client.request(method, path, headers=headers)
                    is_open = route.path in PUBLIC and method in ("GET", "HEAD")
                    assert (response.status_code == 200) == is_open, (method, path)
                    assert is_open or response.status_code == 401, (method, path)
        for path in ("/nope", "/health/", "/health//", "/health/../v1/models", "/page/../v1/models", "/v1", "/%2e"):
            assert (await client.get(path)).status_code == 401, path


async def test_a_wrong_key_gets_openais_error(redis_server: EmbeddedServer, tmp_path: Path) -> None:
    write_keys(tmp_path / "keys", "web")
    async with running_app(redis_server.url, keys=tmp_path / "keys") as (_, client):
        response = await client.get("/v1/models", headers=bearer("sk-my-secret"))
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert error_of(response)["type"] == "authentication_error"
        assert error_of(response)["code"] == "invalid_api_key"
        assert "my-secret" not in response.text
        assert (await client.get("/v1/models", headers={"x-api-key": b"\xff\xfe"})).status_code == 401


async def test_a_key_is_accepted_in_either_header(redis_server: EmbeddedServer, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", "web", "other")
    async with running_app(redis_server.url, keys=tmp_path / "keys") as (_, client):
        for headers in (bearer(keys["web"]), {"authorization": f"bearer  {keys['other']}"}, {"x-api-key": keys["web"]}):
            assert (await client.get("/v1/models", headers=headers)).status_code == 200


async def test_a_key_sees_the_models_that_it_may_use(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    register_model(redis_client, "org/a", max_model_len=9, worker="w", seen=5.0, loras=["tuned", "other"])
    register_model(redis_client, "b", max_model_len=9, worker="w", seen=5.0)
    keys = write_keys(tmp_path / "keys", "web", models='["org/a", "tuned"]')
    async with running_app(redis_server.url, keys=tmp_path / "keys") as (_, client):
        headers = bearer(keys["web"])
        listed = (await client.get("/v1/models", headers=headers)).json()["data"]
        assert [(model["id"], model["parent"], model["created"]) for model in listed] == [
            ("org/a", None, 5),
            ("tuned", "org/a", 5),
        ]
        assert (await client.get("/v1/models/org/a", headers=headers)).json()["id"] == "org/a"
        for hidden in ("b", "other", "none", "", "a"):
            response = await client.get(f"/v1/models/{hidden}", headers=headers)
            assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")


async def test_a_loading_model_is_listed_with_its_progress_and_makes_no_replica_ready(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys", "web", models='["new", "old", "old-lora"]')
    now = time.time()

    def report() -> None:
        """Report again, since a report is believed for 15 s only and a gateway takes some of them to start."""
        report_loading(redis_client, "w1", ["new", "hidden"], progress=0.4567, since=now, now=time.time())
        for worker, name in (("w2", "old"), ("w4", "served")):
            report_loading(redis_client, worker, [name], progress=0.0, since=now, now=time.time())

    report()
    async with running_app(redis_server.url, keys=tmp_path / "keys") as (_, client):
        assert (await client.get("/ready")).status_code == 503
    register_model(redis_client, "old", max_model_len=9, worker="w2", seen=now - 9, loras=["old-lora"])
    register_model(redis_client, "served", max_model_len=9, worker="w3", seen=now - 9)
    async with running_app(redis_server.url, keys=tmp_path / "keys") as (_, client):
        report()
        listed = (await client.get("/v1/models", headers=bearer(keys["web"]))).json()["data"]
        assert [(model["id"], model["state"], model["progress"]) for model in listed] == [
            ("new", "loading", 0.457),
            ("old", "loading", 0.0),
            ("old-lora", "loading", 0.0),
        ]
        assert "max_model_len" not in listed[0]
        for model in listed:  # as OpenAI's SDK does with strict validation
            assert openai.types.Model.model_validate(model).created > 0
        found = await client.get("/v1/models/new", headers=bearer(keys["web"]))
        assert found.json() == listed[0]
        body = {"model": "new", "messages": [{"role": "user", "content": "x"}]}
        refused = await client.post("/v1/chat/completions", headers=bearer(keys["web"]), json=body)
        assert (refused.status_code, refused.headers["x-should-retry"]) == (404, "true")
        assert "'new' is loading (46%)" in error_of(refused)["message"]
    async with running_app(redis_server.url) as (_, client):
        report()
        listed = (await client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed if "state" not in model] == ["served"]


def test_without_a_key_file_it_does_not_start_on_a_public_address(redis_server: EmbeddedServer) -> None:
    with pytest.raises(GatewaySettingsError, match="loopback"):
        make_app(GatewaySettings(redis_url=redis_server.url, host="0.0.0.0"))


async def test_every_response_has_an_id_and_returns_the_callers_separately(anybody: httpx2.AsyncClient) -> None:
    for path in ("/health", "/v1/models", "/nope"):
        response = await anybody.get(path, headers={"X-Request-Id": "mine-1"})
        assert response.headers["x-request-id"].startswith("req_")
        assert response.headers["x-client-request-id"] == "mine-1"
        assert response.headers["openai-processing-ms"].isdecimal()
    for bad in ("two words", "x" * 129, ""):
        assert "x-client-request-id" not in (await anybody.get("/health", headers={"X-Request-Id": bad})).headers


async def test_unknown_paths_and_methods_get_openais_error(anybody: httpx2.AsyncClient) -> None:
    for path in ("/v1/audio/speech", "/v1/models/x/../..", "/v1/chat/completions/", "/favicon.ico"):
        response = await anybody.post(path, headers=JSON)
        assert response.status_code in (404, 405), path
        assert error_of(response)["type"] == "invalid_request_error"
    assert "/v1/audio/speech" in error_of(await anybody.post("/v1/audio/speech", headers=JSON))["message"]
    response = await anybody.delete("/v1/models")
    assert response.status_code == 405
    assert "GET" in response.headers["allow"]
    assert error_of(response)["message"] == "/v1/models does not allow DELETE"


BODIES = {
    "no JSON": (b"{", 400),
    "empty": (b"", 400),
    "no object": (b"[]", 400),
    "a lone surrogate": (b'{"model": "\\ud800"}', 400),
    "NaN": (b'{"temperature": NaN}', 400),
    "1e999": (b'{"temperature": 1e999}', 400),
    "2,000 deep": (b'{"a":' * 2000 + b"1" + b"}" * 2000, 400),
    "900 deep": (b'{"model":"tiny","messages":' + b"[" * 900 + b"]" * 900 + b"}", 400),
    "no UTF-8": (b'{"\xff": 1}', 400),
    "too large": (b" " * 5000, 413),
}


@pytest.mark.parametrize("what", BODIES)
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_that_cannot_be_read_is_refused(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", what: str, is_chunked: bool
) -> None:
    register_model(redis_client, "tiny", max_model_len=9, worker="w", seen=5.0)
    body, status = BODIES[what]
    limit = 4000 if what == "too large" else 2**20

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 1000):
            yield body[at : at + 1000]

    async with running_app(redis_server.url, max_body_bytes=limit) as (_, client):
        content = pieces() if is_chunked else body
        response = await client.post("/v1/chat/completions", content=content, headers=JSON)
        assert response.status_code == status, response.text
        assert error_of(response)["type"] == "invalid_request_error"


async def test_other_content_types_and_encodings_are_refused(anybody: httpx2.AsyncClient) -> None:
    for headers in ({"Content-Type": "text/plain"}, {}, {**JSON, "Content-Encoding": "gzip"}):
        response = await anybody.post("/v1/chat/completions", content=b"{}", headers=headers)
        assert response.status_code == 415
        assert error_of(response)["type"] == "invalid_request_error"


async def test_a_page_of_an_allowed_site_may_call_with_any_header(redis_server: EmbeddedServer, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", "web")
    site = "https://chat.example.org"
    async with running_app(redis_server.url, keys=tmp_path / "keys", allow_origin=(site,)) as (_, client):
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-stainless-os"}
        preflight = await client.options("/v1/chat/completions", headers={"Origin": site, **asked})
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == site
        assert preflight.headers["access-control-allow-headers"] == "x-stainless-os"
        for headers in ({}, bearer(keys["web"])):  # a page must be able to read why it was refused
            response = await client.get("/v1/models", headers={"Origin": site, **headers})
            assert response.headers["access-control-allow-origin"] == site
            assert "retry-after" in response.headers["access-control-expose-headers"]
        for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}):
            response = await client.options("/v1/chat/completions", headers={**headers, **asked})
            assert "access-control-allow-origin" not in response.headers
            response = await client.get("/v1/models", headers={**headers, **bearer(keys["web"])})
            assert "access-control-allow-origin" not in response.headers


async def test_an_internal_error_does_not_reveal_its_text(
    redis_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_request: object) -> None:
        raise ValueError(" ".join(("a", "secret")))

    metrics = GatewayMetrics()
    with caplog.at_level(logging.INFO):
        async with running_app(redis_server.url, metrics=metrics) as (app, client):
            app.router.routes.append(Route("/fail", fail))
            response = await client.get("/fail")
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert response.headers["x-request-id"] in error_of(response)["message"]
    assert response.headers["x-request-id"] in caplog.text
    assert "a secret" not in response.text + caplog.text
    assert b'headrace_gateway_refusals_total{code="internal_error"} 1.0' in metrics.exposition()


async def test_requests_and_refusals_are_counted(redis_server: EmbeddedServer, tmp_path: Path) -> None:
    metrics = GatewayMetrics()
    write_keys(tmp_path / "keys", "web")
    async with running_app(redis_server.url, metrics=metrics, keys=tmp_path / "keys") as (_, client):
        await client.get("/v1/models")
        await client.get("/health")
    shown = metrics.exposition()
    assert b'headrace_gateway_http_requests_total{endpoint="models",status="4xx"} 1.0' in shown
    assert b'headrace_gateway_http_requests_total{endpoint="probes",status="2xx"} 1.0' in shown
    assert b'headrace_gateway_refusals_total{code="invalid_api_key"} 1.0' in shown
    assert b"headrace_gateway_redis_up 1.0" in shown
    assert b"headrace_gateway_key_file_valid 1.0" in shown


async def test_without_redis_it_is_alive_but_not_ready(tmp_path: Path) -> None:
    async with running_app("redis://127.0.0.1:1/0") as (_, client):
        assert (await client.get("/health")).status_code == 200
        response = await client.get("/ready")
        assert (response.status_code, response.json()["reason"]) == (503, "Redis does not answer")
        response = await client.get("/v1/models")
        assert (response.status_code, error_of(response)["code"]) == (503, "queue_unavailable")
        assert response.headers["retry-after"] == "1"
        assert "127.0.0.1" not in response.text


async def test_with_a_wrong_password_it_is_not_ready_and_says_so(redis_server: EmbeddedServer) -> None:
    async with running_app(redis_server.url.replace("//", "//gateway:wrong@")) as (_, client):
        response = await client.get("/ready")
        assert response.status_code == 503
        assert response.json()["reason"].startswith("Redis refuses the gateway: invalid username-password pair")


async def test_an_open_stream_is_cut_when_its_key_is_revoked(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    register_model(redis_client, "tiny", max_model_len=64, worker="w", seen=time.time())  # without a worker
    path = tmp_path / "keys"
    keys = write_keys(path, "mine", "other")
    log = tmp_path / "log"
    replica = GatewayProcess(redis_url=redis_server.url, log=log, keys=path, hold_status=0.1, keep_alive=0.1)
    body = {"model": "tiny", "prompt": "a", "stream": True}
    try:
        replica.wait_ready()
        async with (
            httpx2.AsyncClient(base_url=replica.url, timeout=60) as client,
            client.stream("POST", "/v1/completions", json=body, headers=bearer(keys["mine"])) as answer,
        ):
            pieces = answer.aiter_raw()
            assert await anext(pieces)
            write_keys(path, "other")
            with pytest.raises(httpx2.RemoteProtocolError):
                assert not [piece async for piece in pieces if b"[DONE]" in piece]
        assert "request failed" not in log.read_text()
    finally:
        replica.close()


async def test_it_is_ready_once_a_worker_has_registered_a_model(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    async with running_app(redis_server.url) as (_, client):
        response = await client.get("/ready")
        assert (response.status_code, response.json()["reason"]) == (503, "no worker has registered a model")
        register_model(redis_client, "tiny", max_model_len=64, worker="w", seen=time.time())
        while (response := await client.get("/ready")).status_code == 503:
            await asyncio.sleep(0.01)
        assert response.json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, "model is required: GET /v1/models lists the models"),
        (7, "model must be a string, got 7"),
        ("", "model must not be empty: GET /v1/models lists the models"),
    ],
)
async def test_a_request_that_names_no_model_is_told_where_to_find_one(
    redis_server: EmbeddedServer, model: object, message: str
) -> None:
    async with running_app(redis_server.url) as (_, client):
        error = error_of(await client.post("/v1/completions", json={"model": model, "prompt": "a"}))
        assert (error["message"], error["param"]) == (message, "model")


async def test_while_redis_hangs_generations_are_refused_at_once() -> None:
    with make_server() as frozen:
        async with running_app(frozen.url) as (app, client):
            assert frozen.pid is not None
            os.kill(frozen.pid, signal.SIGSTOP)
            try:
                while not app.state.redis_watch.is_down:
                    await asyncio.sleep(0.01)
                response = await client.post("/v1/completions", json={"model": "tiny", "prompt": "a"})
                again = await client.get("/v1/completions/cmpl-" + "0" * 32)
            finally:
                os.kill(frozen.pid, signal.SIGCONT)
            assert (response.status_code, error_of(response)["code"]) == (503, "queue_unavailable")
            assert response.headers["retry-after"] == "1"
            assert again.status_code == 503
            while app.state.redis_watch.is_down:
                await asyncio.sleep(0.01)
            response = await client.post("/v1/completions", json={"model": "tiny", "prompt": "a"})
            assert error_of(response)["code"] == "model_not_found"  # the worker's registry was read


async def test_each_key_without_a_tenant_has_its_own_part_of_the_prefix_cache(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    register_model(redis_client, "tiny", max_model_len=99, worker="w", seen=5.0)
    keys = write_keys(tmp_path / "keys", "a", "b")
    keys |= write_keys(tmp_path / "more", "c", "d", tenant='"acme"')
    (tmp_path / "keys").write_text((tmp_path / "keys").read_text() + (tmp_path / "more").read_text())
    async with running_app(redis_server.url, keys=tmp_path / "keys") as (_, client):
        salts = []
        for name in "abcd":
            body = {"model": "tiny", "input": "x", "background": True}
            assert (await client.post("/v1/responses", json=body, headers=bearer(keys[name]))).status_code == 200
            [message] = [raw for queue in queue_lists("headrace.tiny") if (raw := redis_client.lpop(queue))]
            headers = json.loads(message)["headers"]
            salts.append((headers.get("tenant"), headers.get("cache_salt")))
    assert salts == [(None, "key a"), (None, "key b"), ("acme", None), ("acme", None)]
