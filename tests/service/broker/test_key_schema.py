"""Lua and Python build the same keys."""

import importlib
import pkgutil
from types import ModuleType

import pytest
import redis

import headrace_broker
import headrace_gateway
from headrace_broker import keys
from headrace_broker.key_schema import KeySchema, RedisKey
from headrace_broker.scripts import LuaScript
from headrace_gateway.redis import keys as redis_keys

OWNERS: list[tuple[ModuleType, KeySchema]] = [(keys, keys.KEYS), (redis_keys, redis_keys.KEYS)]
DECLARED = [(owner, key) for owner, schema in OWNERS for key in schema]


@pytest.mark.parametrize(("owner", "key"), DECLARED, ids=[key.name for _, key in DECLARED])
def test_a_key_is_the_same_in_both_languages(redis_client: "redis.Redis", owner: ModuleType, key: RedisKey) -> None:
    if not key.parts:
        built = getattr(owner, f"{key.name.upper()}_KEY")
        found = redis_client.eval(f"{key.lua()}\nreturn {key.name.upper()}", 0)
    else:
        parts = [f"x{number}\x06" for number in range(len(key.parts))]
        build = owner.queue_name if key.name == "list" else getattr(owner, f"{key.name}_key")
        quoted = parts if key.name != "idempotency" else ["x0", parts[1]]
        built = build(*quoted)
        arguments = ", ".join(f"ARGV[{place}]" for place in range(1, len(parts) + 1))
        found = redis_client.eval(f"{key.lua()}\nreturn {key.name}_key({arguments})", 0, *quoted)
    assert found == built.encode()


def test_every_script_compiles(redis_client: "redis.Redis") -> None:
    scripts = {
        text
        for package in (headrace_broker, headrace_gateway)
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if not found.name.endswith("__main__")
        for value in vars(importlib.import_module(found.name)).values()
        for each in (value.values() if isinstance(value, dict) else [value])
        for text in ([each.text] if isinstance(each, LuaScript) else [])
    }
    assert len(scripts) == 49
    for text in scripts:
        redis_client.script_load(text)
