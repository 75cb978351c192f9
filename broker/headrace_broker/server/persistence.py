"""Tells whether a restart of Redis would keep the messages, by its reply to INFO."""

from collections.abc import Mapping
from typing import Any


def persistence_is_ok(info: Mapping[str, Any]) -> bool:
    """Return whether the last write of the append-only file and the last snapshot succeeded."""
    return {info.get("aof_last_write_status"), info.get("rdb_last_bgsave_status")} <= {"ok", None}


def persistence_warning(info: Mapping[str, Any]) -> str | None:
    """Return a warning if the server writes no append-only file, else None."""
    if info.get("aof_enabled"):
        return None
    return (
        "Redis writes no append-only file: a restart loses the messages and streams since its last snapshot, if it has"
        " any; run CONFIG SET appendonly yes, and write `appendonly yes` into redis.conf"
    )
