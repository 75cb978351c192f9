"""Finds the commands that Redis's ACL refuses to a connection, of those that the role of a user needs.

No command is executed: each is queued in a transaction that is discarded, or passed to ACL DRYRUN.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import redis

from headrace_broker.keys import queue_lists, queue_of
from headrace_broker.server.users import User

Command = tuple[str, ...]

_KEY: Final = "<key>"
_DIGEST: Final = "0" * 40
_SAMPLE: Final = "doctor"
"""Stands for the rest of a key: its pattern alone decides."""

_ON_KEY: Final[Mapping[str, str]] = {
    "blpop": "<key> 0",
    "expire": "<key> 1",
    "hdel": "<key> f",
    "hexists": "<key> f",
    "hget": "<key> f",
    "hincrby": "<key> f 1",
    "hmget": "<key> f",
    "hset": "<key> f v",
    "lindex": "<key> 0",
    "lmove": "<key> <key> LEFT RIGHT",
    "lpush": "<key> v",
    "lrange": "<key> 0 1",
    "lrem": "<key> 0 v",
    "ltrim": "<key> 0 1",
    "memory|usage": "<key>",
    "pexpire": "<key> 1",
    "rpush": "<key> v",
    "sadd": "<key> v",
    "set": "<key> v",
    "srem": "<key> v",
    "xadd": "<key> * f v",
    "xrange": "<key> - +",
    "xread": "STREAMS <key> 0",
    "xrevrange": "<key> + -",
    "zadd": "<key> 1 v",
    "zcount": "<key> 0 1",
    "zincrby": "<key> 1 v",
    "zrange": "<key> 0 1",
    "zrangebyscore": "<key> 0 1",
    "zrem": "<key> v",
    "zremrangebyrank": "<key> 0 1",
    "zrevrange": "<key> 0 1",
    "zscore": "<key> v",
}
"""Arguments that have the right number. A command that is not here takes the key alone."""
_SCRIPTS: Final = ("eval", "evalsha", "eval_ro", "evalsha_ro")
_OF_CATEGORY: Final[Mapping[str, str]] = {
    "@string": "get set",
    "@hash": "hget hset hgetall",
    "@sortedset": "zadd zrem zrange",
}
"""A few commands stand for their category."""
_WITHOUT_KEY: Final[Mapping[str, Command]] = {
    "info": ("INFO",),
    "time": ("TIME",),
    "script|load": ("SCRIPT", "LOAD", "return 1"),
    "script|exists": ("SCRIPT", "EXISTS", _DIGEST),
    "acl|dryrun": ("ACL", "DRYRUN", "default", "PING"),
}


def refused_commands(client: "redis.Redis", role: User, username: str = "default") -> list[Command]:
    """Return the commands of the role that the user of this connection may not run, with a sample key.

    Args:
        username: the user of the connection, for ACL DRYRUN. It is needed where the user has no right to transactions.

    Raises:
        RedisError: the server does not answer, or the user may neither begin a transaction nor run ACL DRYRUN.
    """
    commands = list(dict.fromkeys(needed_commands(role)))
    try:
        return _refused_in_transaction(client, commands)
    except redis.exceptions.NoPermissionError:
        dry = [client.execute_command("ACL", "DRYRUN", username, *command) for command in commands]  # type: ignore[no-untyped-call]
        return [command for command, answer in zip(commands, dry, strict=True) if answer not in (b"OK", "OK", True)]


def refused_lists(client: "redis.Redis", queues: Iterable[str]) -> list[str]:
    """Return the queues to which the user of this connection may not push. Redis's errors pass through."""
    commands: list[Command] = [("LPUSH", name, "") for queue in queues for name in queue_lists(queue)]
    return list(dict.fromkeys(queue_of(command[1]) for command in _refused_in_transaction(client, commands)))


def needed_commands(role: User) -> Iterator[Command]:
    """Yield the commands of a role, each on a sample of its keys."""
    words = role.rules.split()
    yield from (_WITHOUT_KEY[word[1:]] for word in words if word[1:] in _WITHOUT_KEY)
    channels = [word[1:] for word in words if word.startswith("&")]
    if "+subscribe" in words:
        yield from (("SUBSCRIBE", channel.replace("*", _SAMPLE)) for channel in channels)
    for rights in (*role.rights, *role.needs):
        for name in " ".join(_OF_CATEGORY.get(name, name) for name in rights.commands.split()).split():
            for pattern in rights.patterns:
                yield _command(name, pattern.replace("*", _SAMPLE))


def _command(name: str, key: str) -> Command:
    if name in _SCRIPTS:
        return name.upper(), _DIGEST if name.startswith("evalsha") else "return 1", "1", key
    arguments = _ON_KEY.get(name, _KEY).split()
    return *name.upper().split("|"), *(key if argument == _KEY else argument for argument in arguments)


def _refused_in_transaction(client: "redis.Redis", commands: list[Command]) -> list[Command]:
    """Queue the commands and discard them. Raises NoPermissionError if the user may not begin a transaction."""
    connection = client.connection_pool.get_connection()
    refused = []
    try:
        connection.send_command("MULTI")  # type: ignore[no-untyped-call]
        connection.read_response()
        for command in commands:
            connection.send_command(*command)  # type: ignore[no-untyped-call]
            try:
                connection.read_response()
            except redis.exceptions.NoPermissionError:
                refused.append(command)
            except redis.ResponseError:
                continue  # the server is read-only or out of memory for every user
    finally:
        connection.disconnect()  # type: ignore[no-untyped-call]  # discards the transaction
        client.connection_pool.release(connection)
    return refused
