"""Warns if Redis may evict keys to free memory, which loses messages, streams and results."""

from collections.abc import Mapping
from typing import Any, Final

SAFE_POLICY: Final = "noeviction"


def eviction_warning(info: Mapping[str, Any]) -> str | None:
    """Return a warning if the server's policy evicts keys, else None. `info` is the reply of INFO."""
    policy = info.get("maxmemory_policy", SAFE_POLICY)
    if policy == SAFE_POLICY:
        return None
    return (
        f"Redis has maxmemory-policy {policy}: when it runs out of memory it evicts messages, streams and results, and"
        f" requests are lost without an error; set it to {SAFE_POLICY}"
    )
