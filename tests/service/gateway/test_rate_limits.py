"""Rate limits of API keys, on a real server. All replicas share them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis

from headrace_broker import AsyncClient
from headrace_broker.models.registry import register_model
from headrace_broker.server.connections import connect_async
from headrace_broker.server.embedded import EmbeddedServer
from headrace_gateway.errors import ApiError
from headrace_gateway.keys.api_key import ApiKey
from headrace_gateway.keys.limits import RateLimits, duration
from service.gateway.in_process import bearer, running_app, write_keys

LEVELS = "headrace:gw:rate:web"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": 4}


@pytest.fixture
async def replicas(redis_server: EmbeddedServer) -> AsyncIterator[tuple[RateLimits, RateLimits]]:
    async with connect_async(redis_server.url) as first, connect_async(redis_server.url) as second:
        yield RateLimits(first), RateLimits(second)


def put_back(client: "redis.Redis", seconds: float) -> None:
    """Let time pass: date the levels that many seconds back."""
    for name, value in client.hgetall(LEVELS).items():
        level, at = map(float, value.split())
        client.hset(LEVELS, name, f"{level:.6f} {at - seconds:.6f}")


async def test_two_replicas_share_the_request_limit_of_a_key(
    replicas: tuple[RateLimits, RateLimits], redis_client: "redis.Redis"
) -> None:
    key = ApiKey("web", requests_per_minute=6)
    outcomes = await asyncio.gather(*(limits.admit(key) for limits in replicas * 5), return_exceptions=True)
    assert sum(isinstance(outcome, dict) for outcome in outcomes) == 6
    refused = [outcome for outcome in outcomes if isinstance(outcome, ApiError)]
    assert {(error.status, error.kind, error.code) for error in refused} == {
        (429, "rate_limit_error", "rate_limit_exceeded")
    }
    assert 1 <= int(refused[0].headers["retry-after"]) <= 10
    put_back(redis_client, 10.0)
    await replicas[0].admit(key)
    with pytest.raises(ApiError):
        await replicas[1].admit(key)


async def test_each_choice_takes_one_request_of_the_limit(replicas: tuple[RateLimits, RateLimits]) -> None:
    limits, key = replicas[0], ApiKey("web", requests_per_minute=60)
    headers = await limits.admit(key)
    assert await limits.admit_choices(key, 1, headers) is headers
    assert (await limits.admit_choices(key, 40, headers))["x-ratelimit-remaining-requests"] == "20"
    with pytest.raises(ApiError, match="the key web has fewer than 29 left of its 60 requests") as raised:
        await limits.admit_choices(key, 30, headers)
    assert 1 <= int(raised.value.headers["retry-after"]) <= 10  # also for the one that it has taken
    with pytest.raises(ApiError, match="the request has 61 choices, more than the 60 requests a minute") as raised:
        await limits.admit_choices(key, 61, headers)
    assert raised.value.status == 429


async def test_a_request_with_choices_is_admitted_after_the_time_that_its_refusal_names(
    replicas: tuple[RateLimits, RateLimits], redis_client: "redis.Redis"
) -> None:
    limits, key = replicas[0], ApiKey("web", requests_per_minute=6)
    await limits.admit_choices(key, 5, await limits.admit(key))
    with pytest.raises(ApiError) as raised:
        await limits.admit_choices(key, 2, await limits.admit(key))
    put_back(redis_client, float(raised.value.headers["retry-after"]))
    await limits.admit_choices(key, 2, await limits.admit(key))


async def test_headers_report_what_is_left_of_each_limit(replicas: tuple[RateLimits, RateLimits]) -> None:
    assert await replicas[0].admit(ApiKey("free")) == {}
    headers = await replicas[0].admit(ApiKey("web", requests_per_minute=60))
    assert headers["x-ratelimit-limit-requests"] == "60"
    assert headers["x-ratelimit-remaining-requests"] == "59"
    assert headers["x-ratelimit-reset-requests"] == "1s"
    assert not any("tokens" in name for name in headers)
    headers = await replicas[1].admit(ApiKey("both", requests_per_minute=60, tokens_per_minute=1000))
    assert headers["x-ratelimit-remaining-tokens"] == "1000"
    assert headers["x-ratelimit-reset-tokens"] == "0ms"


async def test_a_key_whose_token_bucket_is_negative_waits_for_its_refill(
    replicas: tuple[RateLimits, RateLimits], redis_client: "redis.Redis"
) -> None:
    key = ApiKey("web", requests_per_minute=2, tokens_per_minute=2)
    await replicas[0].admit(key)
    await replicas[0].charge(key.name, key.tokens_per_minute, "answer", 42)
    with pytest.raises(ApiError, match="2 tokens of this minute") as raised:
        await replicas[1].admit(key)
    assert 1170 <= int(raised.value.headers["retry-after"]) <= 1232  # a token is paid in 30 s
    assert raised.value.headers["x-ratelimit-remaining-tokens"] == "0"
    assert raised.value.headers["x-ratelimit-remaining-requests"] == "1"  # a refused request is not charged
    assert redis_client.ttl(LEVELS) >= 1170  # the negative level survives the replicas, but not Redis
    put_back(redis_client, 1232.0)
    await replicas[1].admit(key)


async def test_an_answer_is_charged_once_however_often_it_is_read(
    replicas: tuple[RateLimits, RateLimits], redis_client: "redis.Redis"
) -> None:
    key = ApiKey("web", tokens_per_minute=2)
    for limits, tokens in zip(replicas * 3, (10, 30, 30, 40, 40, 5), strict=True):
        await limits.charge(key.name, key.tokens_per_minute, "answer", tokens)
    await replicas[0].charge(key.name, key.tokens_per_minute, "another", 1)
    level = float(redis_client.hget(LEVELS, "tokens").split()[0])
    assert -39 <= level <= -38


async def test_a_lowered_limit_applies_at_once(replicas: tuple[RateLimits, RateLimits]) -> None:
    await replicas[0].admit(ApiKey("web", requests_per_minute=600))
    headers = await replicas[0].admit(ApiKey("web", requests_per_minute=2))
    assert headers["x-ratelimit-remaining-requests"] == "1"


async def test_a_key_without_limits_writes_nothing_to_redis(
    replicas: tuple[RateLimits, RateLimits], redis_client: "redis.Redis"
) -> None:
    await replicas[0].admit(ApiKey("free"))
    await replicas[0].charge("free", None, "answer", 10)
    assert redis_client.keys("*") == []


async def test_without_redis_nothing_is_admitted_and_charging_does_not_fail() -> None:
    async with connect_async("redis://127.0.0.1:1/0") as away:
        limits, key = RateLimits(away), ApiKey("web", tokens_per_minute=5)
        with pytest.raises(redis.ConnectionError):
            await limits.admit(key)
        async with limits.charging(key, "answer", lambda: 10):
            pass


async def test_the_endpoint_refuses_requests_over_the_limit_and_counts_invalid_ones(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    register_model(redis_client, "tiny", max_model_len=9, worker="w", seen=5.0)
    keys = write_keys(tmp_path / "keys", "web", requests_per_minute="1")
    async with running_app(redis_server.url, keys=tmp_path / "keys", hold_status=0.0) as (_, client):
        invalid: dict[str, Any] = {**CHAT, "max_tokens": 0}
        response = await client.post("/v1/chat/completions", json=invalid, headers=bearer(keys["web"]))
        assert response.status_code == 400
        response = await client.post("/v1/chat/completions", json=CHAT, headers=bearer(keys["web"]))
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "rate_limit_exceeded"
        assert response.headers["x-ratelimit-remaining-requests"] == "0"
        assert 1 <= int(response.headers["retry-after"]) <= 60


async def test_the_endpoint_counts_prompts_times_n(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    register_model(redis_client, "tiny", max_model_len=9, worker="w", seen=5.0)
    keys = write_keys(tmp_path / "keys", "web", requests_per_minute="7")
    many = {"model": "tiny", "prompt": ["a", "b"], "n": 4}
    async with running_app(redis_server.url, keys=tmp_path / "keys", hold_status=0.0) as (_, client):
        response = await client.post("/v1/completions", json=many, headers=bearer(keys["web"]))
    assert response.status_code == 429
    assert "the request has 8 choices" in response.json()["error"]["message"]
    assert not redis_client.exists("headrace.tiny")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0ms"), (0.0115, "12ms"), (1.0, "1s"), (1.5, "1.5s"), (60.0, "1m0s"), (359.2, "6m0s")]
)
def test_durations_have_openais_format(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("variable", "code"),
    [("MAX_QUEUED_REQUESTS", "queue_full"), ("MAX_QUEUED_REQUESTS_PER_TENANT", "quota_exceeded")],
)
async def test_the_limits_of_the_queue_are_enforced(
    redis_server: EmbeddedServer,
    redis_client: "redis.Redis",
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    code: str,
) -> None:
    register_model(redis_client, "tiny", max_model_len=99, worker="w", seen=5.0)
    monkeypatch.setenv(f"HEADRACE_{variable}", "1")
    async with running_app(redis_server.url, hold_status=0.0) as (_, client):
        async with AsyncClient(redis_server.url) as producer:
            await producer.submit("hello", model="tiny")
        response = await client.post("/v1/completions", json={"model": "tiny", "prompt": "hello"})
    assert (response.status_code, response.json()["error"]["code"]) == (429, code)
    assert int(response.headers["retry-after"]) >= 1
