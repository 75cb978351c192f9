"""Tokenizer calls through a real gateway and worker: the counts equal the tokens that requests are charged."""

import time
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from openai.types.responses import InputTokenCountResponse

from headrace_broker.client.tokenizer_calls import MAX_WAITING_CALLS
from headrace_broker.keys import tokenizer_calls_key
from headrace_broker.models.registry import register_model
from headrace_broker.server.connections import connect
from headrace_broker.server.embedded import EmbeddedServer
from service.gateway.conftest import RunningGateway
from service.gateway.in_process import bearer, running_app, write_keys

MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello the wheel"}]
TOOL: Any = {"type": "function", "function": {"name": "paint", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=gateway.url, timeout=60) as client:
        yield client


def post(client: httpx2.Client, path: str, body: Any) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize(
    "chat",
    [
        {"messages": MESSAGES},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "hi"}], "continue_final_message": True}
        | {"add_generation_prompt": False},
    ],
)
def test_the_count_of_a_chat_equals_its_prompt_tokens(
    client: httpx2.Client, gateway: RunningGateway, chat: dict[str, Any]
) -> None:
    answer = post(client, "/v1/chat/completions", {"model": gateway.model, "max_tokens": 1, **chat})
    found = post(client, "/tokenize", {"model": gateway.model, **chat})
    assert found["count"] == len(found["tokens"]) == answer["usage"]["prompt_tokens"]
    assert found["max_model_len"] == 2048
    assert found["token_strs"] is None


def test_a_prompt_is_tokenised_as_a_completion_is_and_comes_back_as_text(client: httpx2.Client) -> None:
    answer = post(client, "/v1/completions", {"model": "tiny", "prompt": "hello wheel", "max_tokens": 1})
    found = post(client, "/tokenize", {"prompt": "hello wheel", "return_token_strs": True})  # there is only one model
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) == answer["usage"]["prompt_tokens"]
    assert "hello wheel" in post(client, "/detokenize", {"tokens": found["tokens"]})["prompt"]
    plain = post(client, "/tokenize", {"prompt": "hello wheel", "add_special_tokens": False})
    assert post(client, "/detokenize", {"model": "tiny", "tokens": plain["tokens"]}) == {"prompt": "hello wheel"}


def test_a_text_longer_than_the_context_is_counted_all_the_same(client: httpx2.Client) -> None:
    once, often = (post(client, "/tokenize", {"prompt": "wheel " * times})["count"] for times in (1000, 10_000))
    assert often > 2048 > once  # and too long for the process that takes only short requests
    assert abs(often - 10 * once) < 20


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("/tokenize", {"model": "nobody", "prompt": "x"}, 404, "model_not_found", "model"),
        ("/tokenize", {}, 400, "invalid_request", "prompt"),
        ("/tokenize", {"prompt": ["x"]}, 400, "invalid_request", "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, 400, "unsupported_parameter", "prompt"),
        ("/tokenize", {"messages": []}, 400, "invalid_request", "messages"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "x"}, 400, "unsupported_parameter", "chat_template"),
        (
            "/tokenize",
            {"messages": MESSAGES, "add_special_token": 1},
            400,
            "unsupported_parameter",
            "add_special_token",
        ),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, 400, "invalid_request", "add_special_tokens"),
        ("/tokenize", {"prompt": "the wheel " * 100_000}, 400, "context_length_exceeded", "prompt"),
        ("/detokenize", {"tokens": "x"}, 400, "invalid_request", "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "invalid_request", "tokens"),
        ("/detokenize", {"tokens": [2**31 - 1]}, 400, "invalid_request", None),
        ("/detokenize", {"tokens": [1], "token": 1}, 400, "unsupported_parameter", "token"),
    ],
)
def test_an_invalid_field_is_refused_by_name(
    client: httpx2.Client, path: str, body: Any, status: int, code: str, param: str | None
) -> None:
    response = client.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param), error["message"]


def test_the_input_of_a_response_is_counted_in_openais_shape(gateway: RunningGateway) -> None:
    options: Any = {"input": "hello the wheel", "instructions": "Be brief."}
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as sdk:
        first = sdk.responses.create(model=gateway.model, max_output_tokens=16, **options)
        for body in (options, {**options, "previous_response_id": first.id}):
            raw = sdk.responses.input_tokens.with_raw_response.count(model=gateway.model, **body)
            counted = InputTokenCountResponse.model_validate_json(raw.text, strict=True)
            answer = sdk.responses.create(model=gateway.model, max_output_tokens=16, **body)
            assert answer.usage is not None
            assert counted.input_tokens == answer.usage.input_tokens


def test_a_call_needs_no_free_slot(client: httpx2.Client, gateway: RunningGateway) -> None:
    running = [gateway.service.generate(max_tokens=1500) for _ in range(40)]  # the worker has 32 slots
    gateway.service.wait_tokens([handle.id for handle in running[:32]], at_least=1)
    assert post(client, "/tokenize", {"prompt": "hello"})["count"] > 0
    assert gateway.service.stream(running[0].id).end is None
    for handle in running:
        client.post(f"/headrace/requests/{handle.id}/cancel", json={})


async def test_the_tokenizer_of_a_model_without_workers_is_unavailable(redis_server: EmbeddedServer) -> None:
    with connect(redis_server.url) as redis:
        redis.flushdb()
        register_model(redis, "old", max_model_len=64, worker="w", seen=time.time())
        register_model(redis, "gone", max_model_len=64, worker="w", seen=time.time() - 900, tokenizer_calls=True)
        register_model(redis, "full", max_model_len=64, worker="w", seen=time.time(), tokenizer_calls=True)
        redis.rpush(tokenizer_calls_key("full"), *range(MAX_WAITING_CALLS))
        async with running_app(redis_server.url) as (_, client):
            for model, status, code in (
                ("old", 501, "unsupported"),
                ("gone", 503, "tokenizer_unavailable"),
                ("full", 503, "tokenizer_unavailable"),
            ):
                response = await client.post("/tokenize", json={"model": model, "prompt": "x"})
                assert (response.status_code, response.json()["error"]["code"]) == (status, code)
            several = await client.post("/tokenize", json={"prompt": "x"})
            assert several.json()["error"]["param"] == "model"
        redis.flushdb()


async def test_tokenizer_calls_count_against_the_keys_limit(redis_server: EmbeddedServer, tmp_path: Any) -> None:
    with connect(redis_server.url) as redis:
        redis.flushdb()
        register_model(redis, "old", max_model_len=64, worker="w", seen=time.time())
    keys = write_keys(tmp_path / "keys", "web", requests_per_minute="1")
    async with running_app(redis_server.url, keys=tmp_path / "keys") as (_, client):
        bodies: dict[str, Any] = {"json": {"model": "old", "prompt": "x"}, "headers": bearer(keys["web"])}
        statuses = [(await client.post("/tokenize", **bodies)).status_code for _ in range(2)]
    assert statuses == [501, 429]
