"""Write the users of Redis from the declared keys: `python deploy/redis/generate.py [--check]`.

The names of keys come from the schemas of the broker and the gateway. The rights of each user are declared here. The
lines go to deploy/redis/users.acl and to docker-compose.yml. With --check nothing is written, and the exit status is 1
if a file is stale. The users that may write a key must be exactly the key's declared writers.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace_broker.key_schema import RedisKey
from headrace_broker.keys import KEYS
from headrace_gateway.redis import keys as gateway_keys

ROOT: Final = Path(__file__).parents[2]
FILES: Final = (ROOT / "deploy" / "redis" / "users.acl", ROOT / "docker-compose.yml")
COMMAND: Final = "make reference"
SCHEMA: Final = {key.name: key for schema in (KEYS, gateway_keys.KEYS) for key in schema}

READ: Final = "%R"
WRITE: Final = "%W"
BOTH: Final = ""
WRITING: Final = frozenset(
    "lpush rpush blpop lrem sadd hset xadd set del expire pexpire @string @hash @sortedset".split()  # noqa: SIM905
)
"""Those commands below that change a key. EVAL is not among them: a script's commands need rights of their own."""


def _keys(name: str) -> str:
    """Return the pattern of the keys that the schema calls `name`. A name with a `*` is a pattern itself."""
    return name if "*" in name else re.sub("<.*", "*", SCHEMA[name].pattern)


@dataclass(frozen=True)
class Rights:
    """One selector of an ACL: commands on keys, which have their names in the schema."""

    access: str
    names: str
    commands: str

    def __str__(self) -> str:
        keys = [f"{self.access}~{_keys(name)}" for name in self.names.split()]
        return f"({' '.join([*keys, *(f'+{command}' for command in self.commands.split())])})"

    def may_write(self, key: RedisKey) -> bool:
        if self.access == READ or not WRITING & {*self.commands.split()}:
            return False
        patterns = [_keys(name) for name in self.names.split()]
        prefix = key.pattern.partition("<")[0]
        return any(prefix == each or (each.endswith("*") and prefix.startswith(each[:-1])) for each in patterns)


@dataclass(frozen=True)
class User:
    name: str
    rules: str
    """Rules that do not depend on a key of the schema."""
    rights: tuple[Rights, ...] = ()

    def line(self) -> str:
        password = "off" if self.name == "default" else f"on >{self.password}"
        return " ".join(("user", self.name, password, self.rules, *map(str, self.rights)))

    @property
    def password(self) -> str:
        return f"${{REDIS_{self.name.upper()}_PASSWORD}}"


_EVERYTHING: Final = "~* &* +@all"
_WORKER: Final = (
    "~headrace* ~celery* ~_kombu.* ~unacked* ~*.reply.celery.pidbox* &* +@all -@dangerous -@admin -@scripting "
    "+eval +evalsha +eval_ro +evalsha_ro +script|load +script|exists +info +acl|dryrun"
)
_CONNECTION: Final = "+@connection -@admin -@dangerous -client|tracking -client|caching"
_RESULTS: Final = f"&{_keys('result')}"
_LISTENING: Final = "+subscribe +unsubscribe"
_SCRIPTS: Final = "+eval +evalsha +eval_ro +script|load +script|exists"

_SUBMITTING: Final = (
    Rights(WRITE, "list", "lpush llen exists"),
    Rights(BOTH, f"_kombu.binding.{_keys('list')} _kombu.binding_permanent.{_keys('list')}", "sadd smembers"),
    Rights(READ, "models", "hgetall"),
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
    Rights(READ, "stream", "xread xrange xrevrange"),
    Rights(READ, "stream ended result", "exists"),
    Rights(READ, "listener", "get"),
    Rights(WRITE, "listener", "expire"),
    Rights(READ, "result", "get mget"),
)
_CLIENT: Final = (*_SUBMITTING, *(rights for rights in _FOLLOWING if rights not in _SUBMITTING))
_GATEWAY: Final = (
    Rights(BOTH, "headrace:gw:*", "eval evalsha @string @hash @sortedset del expire pexpire ttl"),
    Rights(BOTH, "tokenizer_calls", "eval evalsha llen rpush pexpire"),
    Rights(BOTH, "tokenizer_answer", "blpop"),
    Rights(BOTH, "hub", "xadd expire"),
    Rights(READ, "stream hub", "xread xrange xrevrange"),
    Rights(READ, "stream", "memory|usage"),
    Rights(READ, "headrace*", "eval_ro type exists llen lindex lrange hget hgetall hexists zcard zcount zrange"),
    # to requeue dead letters, or to delete them with the remaining keys of their requests
    Rights(BOTH, "dead_letters list headrace:lease:* stream ended listener engine_losses result", "eval evalsha"),
    Rights(WRITE, "ended result", "expire"),
    Rights(BOTH, "dead_letters", "lrem"),
    Rights(BOTH, "stream ended listener engine_losses result", "del"),
)
USERS: Final = (
    User("default", _EVERYTHING),
    User("admin", _EVERYTHING),
    User("worker", _WORKER),
    User("operator", _WORKER),
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
        "+type +llen +lindex +hget +hgetall +zcard +zcount +zrange",
    ),
)


def wrong_writers(users: tuple[User, ...] = USERS) -> Iterator[str]:
    """Yield a message for each key whose declared writers are not the users that may write it.

    Workers and operators may write all keys. `client` is a producer and a subscriber.
    """
    for key in SCHEMA.values():
        allowed = {user.name for user in users if any(rights.may_write(key) for rights in user.rights)} - {"client"}
        declared = {*key.writers} - {"worker", "operator"}
        if allowed != declared:
            yield (
                f"key {key.name}: its declared writers are {', '.join(sorted(declared)) or 'workers alone'}, "
                f"but {', '.join(sorted(allowed)) or 'no others'} may write it"
            )


def lines() -> list[str]:
    return [user.line() for user in USERS]


def text_of(path: Path) -> str:
    """Return what the file should contain."""
    if path.suffix == ".acl":
        return "\n".join(lines()) + "\n"
    found = [re.sub(r"(_PASSWORD)\}", r"\1:?run deploy/compose/make-env}", line) for line in lines()]
    block = "".join(f"  {line}\n" for line in found)
    written, count = re.subn(r"(?m)(?:^  user \S+ (?:on|off) .*\n)+", lambda _: block, path.read_text(encoding="utf-8"))
    assert count == 1, f"{path.name} must have one block of users, got {count}"
    return written


def stale(paths: tuple[Path, ...] = FILES) -> list[str]:
    """Return the names of the files that differ from the declarations."""
    return [path.name for path in paths if path.read_text(encoding="utf-8") != text_of(path)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a file is stale")
    is_check = parser.parse_args().check
    wrong = list(wrong_writers())
    if is_check and stale():
        wrong.append(f"{', '.join(stale())} differ from the declared keys and rights; run `{COMMAND}`")
    sys.stderr.writelines(f"deploy/redis: {problem}\n" for problem in wrong)
    if not is_check and not wrong:
        for path in FILES:
            path.write_text(text_of(path), encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
