"""Whether Redis may drop keys to make room, which loses messages, streams and results."""

from collections.abc import Mapping
from typing import Any, Final

SAFE_POLICY: Final = "noeviction"


def eviction_warning(info: Mapping[str, Any]) -> str | None:
    """What is wrong with the server's policy, as a sentence; None where it drops nothing. `info` is that of INFO."""
    policy = info.get("maxmemory_policy", SAFE_POLICY)
    if policy == SAFE_POLICY:
        return None
    return (
        f"Redis has maxmemory-policy {policy}: where memory gets short it drops messages, streams and results, and"
        f" requests are lost without an error; set it to {SAFE_POLICY}"
    )
