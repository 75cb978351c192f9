"""Tells whether Redis can load all of its append-only file at the next start, and whether it could at the last one.

In the file, a transaction, or a script with several writes, is one MULTI/EXEC. Versions before `_FIRST_MENDED` check
each EXEC against the rights of the user `default`. If that user is off and has no rights, Redis drops all of them
without a failure: messages, leases and streams are lost. The remedy is a default user that is off and has all rights:
nobody can connect as this user.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import redis
import redis.asyncio

from headrace_broker.keys import queue_name, result_key, stream_key

_FIRST_MENDED: Final = {
    "valkey": ((7, 2, 15), (8, 0, 11), (8, 1, 10), (9, 1, 2)),
    "redis": ((8, 6, 0),),
}
"""The first release of each series without the fault, by the release notes. Every later series is without it."""

_DRY_RUN: Final = ("default", "DEL", stream_key("x"), queue_name("x"), result_key("x"))
"""Arguments of ACL DRYRUN, which tells whether the default user could write keys of ours. DEL is not executed."""

REMEDY: Final = (
    "run ACL SETUSER default off ~* &* +@all, put the line `user default off ~* &* +@all` into the ACL file, and run"
    " BGREWRITEAOF before the next restart (docs/upgrade.md)"
)


@dataclass(frozen=True, slots=True)
class RestartSafety:
    """The result of the check of one server."""

    loads_all: bool | None
    """Whether the next restart loads the whole append-only file; None if our user may not ask."""
    load_errors: int
    """Commands that the server refused while it loaded its file, or took over its primary's writes, since its start."""
    warnings: tuple[str, ...]
    """For the log: what is lost or would be lost, and what to do."""


def restart_safety(client: "redis.Redis", info: Mapping[str, Any] | None = None) -> RestartSafety:
    """Check the server of this client. `info` is its reply to INFO; without it, INFO is called.

    Raises RedisError if the server does not answer or the user may not run INFO.
    """
    info = client.info() if info is None else info
    if not _is_affected(info):
        return _judge(info, "OK")
    try:
        answer: object = client.acl_dryrun(*_DRY_RUN)
    except redis.ResponseError as error:
        answer = error
    return _judge(info, answer)


async def restart_safety_async(client: "redis.asyncio.Redis") -> RestartSafety:
    """Return the same as `restart_safety`."""
    info = await client.info()
    if not _is_affected(info):
        return _judge(info, "OK")
    try:
        answer: object = await client.acl_dryrun(*_DRY_RUN)
    except redis.ResponseError as error:
        answer = error
    return _judge(info, answer)


def _is_affected(info: Mapping[str, Any]) -> bool:
    """Whether the server writes an append-only file and would check the default user's rights when it loads it."""
    if not info.get("aof_enabled"):
        return False
    name = "valkey" if "valkey_version" in info else "redis"
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", str(info[f"{name}_version"]))
    version = tuple(map(int, found.groups())) if found else (0, 0, 0)
    mended = _FIRST_MENDED[name]
    return version < mended[-1] and not any(version[:2] == first[:2] and version >= first for first in mended)


def _judge(info: Mapping[str, Any], answer: object) -> RestartSafety:
    errors = int(info.get("unexpected_error_replies", 0))
    warnings = []
    if errors:
        warnings.append(
            f"Redis refused {errors} commands when it loaded its append-only file at its last start: messages and"
            " streams are lost, have their producers send them again"
        )
    loads_all: bool | None = None
    if isinstance(answer, redis.ResponseError):
        warnings.append(
            "Redis loads its append-only file with the rights of its default user, and whether these suffice could not"
            f" be checked ({answer}); grant this user +acl|dryrun, or {REMEDY}"
        )
    else:
        loads_all = answer in ("OK", b"OK")
    if loads_all is False:
        warnings.append(
            "Redis would lose transactions and scripts' writes at its next restart, because its default user has no"
            f" rights to load them from the append-only file; {REMEDY}"
        )
    return RestartSafety(loads_all, errors, tuple(warnings))
