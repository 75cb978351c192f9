"""The users of Redis, one for each role, and the rights of each.

deploy/redis/generate.py writes deploy/redis/users.acl from them. `headrace doctor` checks a connection against them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from headrace_broker.key_schema import RedisType
from headrace_broker.keys import GATEWAY_KEYS, KEYS, LEASE_KEYS

READ: Final = "%R"
WRITE: Final = "%W"
BOTH: Final = ""

_OF_TYPE: Final[Mapping[RedisType, str]] = {
    "string": "get set",
    "list": "lpush rpush lpop blpop lmove lindex llen lrange lrem ltrim",
    "set": "sadd srem smembers",
    "zset": "zadd zincrby zrem zremrangebyrank zremrangebyscore zcard zscore zrange zrangebyscore zrevrange",
    "hash": "hget hset hsetnx hdel hexists hgetall hincrby hlen hmget hrandfield",
    "stream": "xadd xrange xrevrange",
}
"""The commands that workers and their scripts run on keys of each type."""
_OF_ALL_TYPES: Final = "del exists expire pexpire ttl type eval evalsha eval_ro"


def key_pattern(name: str) -> str:
    """Return the pattern of the keys that the schema calls `name`. A name with a `*` is a pattern itself."""
    return name if "*" in name else re.sub("<.*", "*", KEYS[name].pattern)


@dataclass(frozen=True)
class Rights:
    """One selector of an ACL: commands on keys, which have their names in the schema."""

    access: str
    names: str
    commands: str

    @property
    def patterns(self) -> list[str]:
        """The patterns of the keys, without the access."""
        return [key_pattern(name) for name in self.names.split()]

    def __str__(self) -> str:
        keys = [f"{self.access}~{pattern}" for pattern in self.patterns]
        return f"({' '.join([*keys, *(f'+{command}' for command in self.commands.split())])})"


@dataclass(frozen=True)
class User:
    name: str
    rules: str
    """Rules that do not depend on a key of the schema."""
    rights: tuple[Rights, ...] = ()
    needs: tuple[Rights, ...] = ()
    """What the role needs of the keys in `rules`."""


_EVERYTHING: Final = "~* &* +@all"
_WORKER: Final = (
    "~headrace* ~celery* ~_kombu.* ~unacked* ~*.reply.celery.pidbox* &* +@all -@dangerous -@admin -@scripting "
    "+eval +evalsha +eval_ro +evalsha_ro +script|load +script|exists +info +acl|dryrun"
)
_WORKER_NEEDS: Final = (
    *(Rights(BOTH, key.name, f"{_OF_TYPE[key.type]} {_OF_ALL_TYPES}") for key in KEYS),
    Rights(BOTH, "_kombu.binding.*", _OF_TYPE["set"]),
    Rights(BOTH, "*.reply.celery.pidbox", _OF_TYPE["list"]),
)
_EXPORTER_NEEDS: Final = (Rights(READ, "headrace*", "eval_ro type llen lindex get hget hgetall zcard zcount zrange"),)
_CONNECTION: Final = "+@connection -@admin -@dangerous -client|tracking -client|caching +cluster|slots"
_RESULTS: Final = f"&{key_pattern('result')}"
_LISTENING: Final = "+subscribe +unsubscribe"
_SCRIPTS: Final = "+eval +evalsha +eval_ro +script|load +script|exists"

_SUBMITTING: Final = (
    Rights(WRITE, "list", "lpush llen exists"),
    Rights(
        BOTH, f"_kombu.binding.{key_pattern('list')} _kombu.binding_permanent.{key_pattern('list')}", "sadd smembers"
    ),
    Rights(READ, "models", "hgetall"),
    Rights(READ, "stream_servers", "hgetall"),
    Rights(READ, "stream_server_id", "get"),
    Rights(BOTH, "idempotency", "hmget hset expire exists type eval evalsha"),
    Rights(BOTH, "stream ended", "eval evalsha"),
    Rights(BOTH, "stream", "xrevrange xadd expire type"),
    Rights(WRITE, "ended", "set"),
    Rights(WRITE, "listener", "set expire"),
    Rights(READ, "stream ended result", "exists"),
    Rights(READ, "waiting delayed_tenants tenant_ids", "eval_ro"),
    Rights(READ, "waiting delayed_tenants", "zscore"),
    Rights(READ, "arrived", "llen"),
    Rights(READ, "sorted_ids tenant_ids delayed", "zcard"),
    Rights(READ, "sorted_ids tenant_ids", "zrange"),
)
_FOLLOWING: Final = (
    Rights(BOTH, "hub", "xadd expire"),
    Rights(READ, "stream hub", "xread xrange xrevrange"),
    Rights(READ, "stream ended result", "exists"),
    Rights(READ, "stream_servers", "hgetall"),
    Rights(READ, "stream_server_id", "get"),
    Rights(READ, "listener", "get"),
    Rights(WRITE, "listener", "expire"),
    Rights(READ, "result", "get mget"),
)
_CLIENT: Final = (*_SUBMITTING, *(rights for rights in _FOLLOWING if rights not in _SUBMITTING))
_GATEWAY: Final = (
    Rights(BOTH, GATEWAY_KEYS, "eval evalsha @string @hash @sortedset del expire pexpire ttl"),
    Rights(BOTH, "tokenizer_calls", "eval evalsha llen rpush pexpire"),
    Rights(BOTH, "tokenizer_answer", "blpop"),
    Rights(READ, "stream", "memory|usage"),
    Rights(READ, "headrace*", "eval_ro type exists llen lindex lrange hget hgetall hexists zcard zcount zrange"),
    Rights(BOTH, "reserved reserved_tokens spent", "eval evalsha @hash @sortedset del expire ttl type exists"),
    # to requeue dead letters, or to delete them with the remaining keys of their requests
    Rights(BOTH, f"dead_letters list {LEASE_KEYS} stream ended listener engine_losses result", "eval evalsha"),
    Rights(WRITE, "ended result", "expire"),
    Rights(BOTH, "dead_letters", "lrem"),
    Rights(BOTH, "stream ended listener engine_losses result", "del"),
)
USERS: Final = (
    User("default", _EVERYTHING),
    User("admin", _EVERYTHING),
    User("worker", _WORKER, needs=_WORKER_NEEDS),
    User("operator", _WORKER, needs=_WORKER_NEEDS),
    User(
        "client",
        f"resetchannels {_RESULTS} {_CONNECTION} +@transaction +info +time {_LISTENING} {_SCRIPTS}",
        _CLIENT,
    ),
    User(
        "gateway",
        f"resetchannels {_RESULTS} {_CONNECTION} +@transaction +info +time +acl|dryrun {_LISTENING} {_SCRIPTS}",
        (*_CLIENT, *_GATEWAY),
    ),
    User("producer", f"resetchannels {_CONNECTION} +@transaction +info +time {_SCRIPTS}", _SUBMITTING),
    User("subscriber", f"resetchannels {_RESULTS} {_CONNECTION} +@transaction +info {_LISTENING}", _FOLLOWING),
    User(
        "exporter",
        f"resetchannels {READ}~headrace* {_CONNECTION} +eval_ro +info +time +acl|dryrun "
        "+type +llen +lindex +get +hget +hgetall +zcard +zcount +zrange",
        needs=_EXPORTER_NEEDS,
    ),
)
