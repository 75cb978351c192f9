"""The registry of models: clients read entries that workers of any release wrote."""

import math
import time
from typing import Any

import pytest
import redis

from headrace_broker import Client, LoadingModel, RegisteredModel, TemplateFeatures
from headrace_broker.keys import LOADING_KEY, LOADING_SECONDS, MODELS_KEY
from headrace_broker.models.loading_models import forget_loading, loading_models, report_loading
from headrace_broker.models.registry import known_models, read_models, register_model
from headrace_broker.packing import pack
from headrace_broker.server.connections import connect
from headrace_broker.server.embedded import EmbeddedServer

OLD = {"max_model_len": 64, "seen": 5.0, "worker": "w"}


def test_a_model_is_read_as_it_was_registered(redis_client: "redis.Redis") -> None:
    template = TemplateFeatures(
        exists=True, tools=True, developer=True, thinking="enable_thinking", reasoning_effort=True, special_tags=True
    )
    said: dict[str, Any] = {
        "max_model_len": 64,
        "worker": "w",
        "weights": "abc",
        "tokenizer": "def",
        "loras": ("a", "b"),
        "tool_parser": "hermes",
        "reasoning_parser": "think",
        "template": template,
    }
    for seen in (5.0, 6.0):
        register_model(redis_client, "m", seen=seen, **said)
    assert known_models(redis_client) == {"m": RegisteredModel("m", seen=6.0, created=5.0, **said)}


def test_a_worker_registers_with_the_fields_of_an_older_release(redis_client: "redis.Redis") -> None:
    redis_client.hset(MODELS_KEY, "m", pack(OLD))
    register_model(redis_client, "m", max_model_len=32, worker="w2", seen=9.0)
    assert known_models(redis_client) == {"m": RegisteredModel("m", 32, 9.0, "w2", created=5.0)}


def test_an_entry_of_an_older_worker_has_defaults() -> None:
    assert read_models({b"m": pack(OLD)}) == {"m": RegisteredModel("m", 64, 5.0, "w", created=5.0)}


def test_unknown_fields_of_a_newer_worker_are_ignored() -> None:
    entry = {**OLD, "more": 1, "template": {"exists": True, "vision": True, "tools": "yes", "thinking": 3}}
    assert read_models({b"m": pack(entry)})["m"].template == TemplateFeatures(exists=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_model_len": math.inf},
        {"max_model_len": "many"},
        {"seen": math.nan},
        {"seen": math.inf},
        {"created": math.nan},
        {"created": -math.inf},
        {"seen": None},
    ],
)
def test_a_malformed_entry_is_left_out(wrong: dict[str, Any]) -> None:
    assert set(read_models({b"m": pack({**OLD, **wrong}), b"fine": pack(OLD)})) == {"fine"}


@pytest.mark.parametrize("wrong", [{"loras": "a"}, {"tool_parser": 1}, {"weights": []}, {"template": []}])
def test_a_field_of_the_wrong_type_counts_as_absent(wrong: dict[str, Any]) -> None:
    assert read_models({b"m": pack({**OLD, **wrong})}) == {"m": RegisteredModel("m", 64, 5.0, "w", created=5.0)}


def test_the_registered_speed_is_an_average_and_outlives_workers_without_one(redis_client: "redis.Redis") -> None:
    for worker, speed, registered in (
        ("a", None, None),
        ("a", 100.0, 100.0),
        ("b", 300.0, 200.0),
        ("c", None, 200.0),
    ):
        register_model(redis_client, "m", max_model_len=64, worker=worker, seen=1.0, tokens_per_second=speed)
        assert known_models(redis_client)["m"].tokens_per_second == registered


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf, "fast", True, [1.0]])
def test_a_speed_that_is_none_counts_as_unknown(wrong: Any) -> None:
    assert read_models({b"m": pack({**OLD, "tokens_per_second": wrong})})["m"].tokens_per_second is None


def test_a_loading_worker_is_seen_until_it_ends_and_registers_no_model(
    redis_client: "redis.Redis", redis_server: EmbeddedServer
) -> None:
    now = time.time()
    report_loading(redis_client, "w", ["m"], progress=0.0, since=now, now=now)
    report_loading(redis_client, "w", ["m"], progress=0.4, since=now, now=now)
    assert loading_models(redis_client) == {"m": LoadingModel("m", 0.4, now, frozenset({"w"}))}
    assert 0 < redis_client.ttl(LOADING_KEY) <= LOADING_SECONDS
    with Client(redis_server.url) as client:
        assert client.loading_models() == loading_models(redis_client)
        assert client.models() == {}
        client.submit("x", model="other")  # still accepted: without a registered model, every name is
    forget_loading(redis_client, "w")
    assert loading_models(redis_client) == {}


def test_a_user_that_may_not_read_the_loading_models_sees_none(
    redis_client: "redis.Redis", redis_server: EmbeddedServer
) -> None:
    now = time.time()
    report_loading(redis_client, "w", ["m"], progress=0.0, since=now, now=now)
    redis_client.acl_setuser("narrow", enabled=True, nopass=True, keys=["headrace:models"], commands=["+@all"])
    try:
        with connect(redis_server.url.replace("redis://", "redis://narrow:x@")) as narrow:
            assert loading_models(narrow) == {}
    finally:
        redis_client.acl_deluser("narrow")
