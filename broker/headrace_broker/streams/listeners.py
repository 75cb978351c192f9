"""Subscriber heartbeats of requests that were sent with `abandon_after`.

Such a request has a key whose value is its `abandon_after`, set by the client that submits it or the worker that takes
it. A heartbeat is an EXPIRE of that key to one day. Every subscriber sends one after each third of `abandon_after`. The
key's remaining life tells the time since the last heartbeat, by Redis's clock alone. EXPIRE creates no missing key.
"""

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

import redis

from headrace_broker.keys import LISTENER_SECONDS, ended_key, listener_key
from headrace_broker.scripts import script
from headrace_broker.server.connections import BLOCK_SECONDS
from headrace_broker.server.shards import key_prefix
from headrace_broker.server.stream_table import MAIN
from headrace_wire.values import is_number

SHORTEST_SECONDS: Final = 1
LONGEST_SECONDS: Final = 3600
_FORGET: Final = script("listeners_forget")


def is_abandon_after(value: object) -> bool:
    """Return whether the value is a valid number of seconds for `abandon_after`."""
    return is_number(value) and SHORTEST_SECONDS <= value <= LONGEST_SECONDS


def start_heartbeats(pipe: Any, request_id: str, abandon_after: float) -> None:
    """Add to a pipeline the command that sets the request's key, unless it exists."""
    pipe.set(listener_key(request_id), abandon_after, ex=LISTENER_SECONDS, nx=True)


def get_abandon_after(pipe: Any, request_id: str) -> None:
    """Add to a pipeline the command whose reply `read_abandon_after` decodes."""
    pipe.get(listener_key(request_id))


def read_abandon_after(value: bytes | None) -> float | None:
    """Return the request's `abandon_after`; None if it needs no heartbeats."""
    try:
        return None if value is None else float(value)
    except ValueError:
        return None


def heartbeat_interval(abandon_after: float) -> float:
    """Return the seconds from one heartbeat to the next."""
    return abandon_after / 3


def send_heartbeat(pipe: Any, request_id: str) -> None:
    """Add a heartbeat to a pipeline."""
    pipe.expire(listener_key(request_id), LISTENER_SECONDS)


class Listeners:
    """The worker's side: reads heartbeats. Redis's errors pass through."""

    def __init__(self, client: "redis.Redis", home: str = MAIN) -> None:
        self._client: Final = client
        self._prefix: Final = key_prefix(home)

    def silence(self, requests: Mapping[str, float], forget: Iterable[str] = ()) -> dict[str, float]:
        """Return the seconds since the last heartbeat of each of these requests, in one round trip.

        Args:
            requests: `abandon_after` by request id. A request without a key gets one, which counts as a heartbeat.
            forget: requests that this worker no longer holds. The keys of those that have ended are deleted.
        """
        ids = [self._prefix + request_id for request_id in forget]
        keys = _FORGET.keys(listener=[*map(listener_key, ids)], ended=[*map(ended_key, ids)])
        with self._client.pipeline(transaction=False) as pipe:
            if keys:
                pipe.eval(_FORGET.text, len(keys), *keys)
            num_before = len(pipe)
            for request_id, abandon_after in requests.items():
                start_heartbeats(pipe, self._prefix + request_id, abandon_after)
                pipe.pttl(listener_key(self._prefix + request_id))
            left = pipe.execute()[num_before + 1 :: 2]
        return {
            request_id: LISTENER_SECONDS - milliseconds / 1000
            for request_id, milliseconds in zip(requests, left, strict=True)
        }


def wait_seconds(deadline: float | None, abandon_after: float | None) -> float:
    """Return the seconds that one wait for a result may take; 0 or less after the deadline (monotonic time)."""
    left = math.inf if deadline is None else deadline - time.monotonic()
    return min(BLOCK_SECONDS, left, math.inf if abandon_after is None else heartbeat_interval(abandon_after))
