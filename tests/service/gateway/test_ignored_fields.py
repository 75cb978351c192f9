"""Fields without effect: the answer names them, and a strict gateway refuses them."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from headrace_monitoring.gateway_metrics import GatewayMetrics
from service.gateway.conftest import RunningGateway
from service.gateway.in_process import running_app

MESSAGES = [{"role": "user", "content": "hello", "timestamp": 7}]
CHAT: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 2, "chat_id": "7", "options": {"num_ctx": 2048}}
RESPONSE: dict[str, Any] = {"input": "hello", "max_output_tokens": 2, "client_metadata": {}, "truncation": "auto"}
MESSAGE: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 2, "thread": {}}
REQUESTS = [
    ("/v1/chat/completions", CHAT, "chat_id, options, messages[].timestamp"),
    ("/v1/chat/completions", {**CHAT, "stream": True}, "chat_id, options, messages[].timestamp"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 2, "num ctx,\n": 1, "": 1}, 'num%20ctx%2C%0A, ""'),
    ("/v1/responses", RESPONSE, "client_metadata, truncation"),
    ("/v1/responses/input_tokens", RESPONSE, "client_metadata, truncation"),
    ("/v1/messages", MESSAGE, "thread, messages[].timestamp"),
    ("/v1/messages/count_tokens", MESSAGE, "max_tokens, thread, messages[].timestamp"),
    ("/tokenize", {"messages": MESSAGES, "chat_id": "7"}, "chat_id, messages[].timestamp"),
    ("/detokenize", {"tokens": [5], "chat_id": "7"}, "chat_id"),
]


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=gateway.url, timeout=120) as client:
        yield client


@pytest.mark.parametrize(("path", "body", "named"), REQUESTS)
async def test_the_answer_names_ignored_fields(
    client: httpx2.AsyncClient, gateway: RunningGateway, path: str, body: dict[str, Any], named: str
) -> None:
    answer = await client.post(path, json={**body, "model": gateway.model})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-headrace-ignored"] == named


async def test_an_answer_to_known_fields_has_no_such_header(
    client: httpx2.AsyncClient, gateway: RunningGateway
) -> None:
    answer = await client.post("/v1/completions", json={"model": gateway.model, "prompt": "a", "max_tokens": 1})
    assert "x-headrace-ignored" not in answer.headers


async def test_a_strict_gateway_refuses_them_and_both_count_them(gateway: RunningGateway) -> None:
    for strict in (False, True):
        metrics = GatewayMetrics()
        async with running_app(gateway.service.server.url, metrics=metrics, strict=strict) as (_, client):
            answer = await client.post("/detokenize", json={"model": gateway.model, "tokens": [5], "chat_id": "7"})
            if strict:
                error = answer.json()["error"]
                assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", "chat_id")
                assert error["message"] == "unknown field 'chat_id'"
            else:
                assert answer.status_code == 200
        counted = b'headrace_gateway_ignored_fields_total{endpoint="tokenizer"} 1.0' in metrics.exposition()
        assert counted is not strict  # a refusal is counted as such
        assert (b'headrace_gateway_refusals_total{code="unsupported_parameter"} 1.0' in metrics.exposition()) is strict


@pytest.mark.parametrize("name", ["max_token", "maxTokens", "Temperature", "stream-options"])
async def test_a_misspelt_field_is_refused_with_the_known_name(
    client: httpx2.AsyncClient, gateway: RunningGateway, name: str
) -> None:
    answer = await client.post(
        "/v1/chat/completions", json={"model": gateway.model, "messages": MESSAGES, "max_tokens": 1, name: 1}
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, name)
    assert "did you mean" in error["message"]


async def test_the_answer_of_a_batch_line_names_them(client: httpx2.AsyncClient, gateway: RunningGateway) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {**CHAT, "model": gateway.model}}
    form: Any = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", json.dumps(line).encode())}}
    file = (await client.post("/v1/files", **form)).json()
    asked = {"input_file_id": file["id"], "endpoint": line["url"], "completion_window": "24h"}
    batch = (await client.post("/v1/batches", json=asked)).json()
    while batch["status"] not in ("completed", "failed"):
        await asyncio.sleep(0.05)
        batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
    output = await client.get(f"/v1/files/{batch['output_file_id']}/content")
    assert json.loads(output.text)["response"]["ignored"] == ["chat_id", "options", "messages[].timestamp"]
