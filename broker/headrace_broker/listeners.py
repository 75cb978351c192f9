"""Whether anybody listens to a request that was sent with `abandon_after`.

Such a request has a key, made by the client that sends it or by the worker that takes it; its value is `abandon_after`.
Whoever listens touches the key every third of that time. It lives for a day after each touch, so what is left of its
life tells, by Redis's clock alone, how long ago the last one was. A touch is an EXPIRE, which makes no key of its own.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from headrace_broker.keys import LISTENER_SECONDS, ended_key, listener_key
from headrace_broker.scripts import script

if TYPE_CHECKING:
    import redis

SHORTEST_SECONDS: Final = 1
LONGEST_SECONDS: Final = 3600
_FORGET: Final = script("listeners_forget")


def is_abandon_after(value: object) -> bool:
    """Whether it is a number of seconds that a request may name."""
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and SHORTEST_SECONDS <= value <= LONGEST_SECONDS
    )


def begin_listening(pipe: Any, request_id: str, abandon_after: float) -> None:
    """Somebody listens as of now; into a pipeline of either kind of client. Changes nothing where it was known."""
    pipe.set(listener_key(request_id), abandon_after, ex=LISTENER_SECONDS, nx=True)


def ask_abandon_after(pipe: Any, request_id: str) -> None:
    """Into a pipeline; `read_abandon_after` reads the answer."""
    pipe.get(listener_key(request_id))


def read_abandon_after(value: bytes | None) -> float | None:
    """The request's `abandon_after`; None where nobody need listen."""
    try:
        return None if value is None else float(value)
    except ValueError:
        return None


def touch_every(abandon_after: float) -> float:
    """Seconds from one touch to the next."""
    return abandon_after / 3


def touch(pipe: Any, request_id: str) -> None:
    """Somebody listens still; into a pipeline."""
    pipe.expire(listener_key(request_id), LISTENER_SECONDS)


class Listeners:
    """The worker's side. Redis's errors pass through."""

    def __init__(self, client: "redis.Redis") -> None:
        self._client: Final = client

    def silence(self, requests: Mapping[str, float], forget: Iterable[str] = ()) -> dict[str, float]:
        """Seconds since anybody listened to each of these requests, in one round trip.

        Args:
            requests: `abandon_after` by request id. To one without a key somebody listens as of now.
            forget: requests that are no longer this worker's. Those that have ended are forgotten.
        """
        ids = list(forget)
        keys = _FORGET.keys(listener=[*map(listener_key, ids)], ended=[*map(ended_key, ids)])
        with self._client.pipeline(transaction=False) as pipe:
            if keys:
                pipe.eval(_FORGET.text, len(keys), *keys)
            num_before = len(pipe)
            for request_id, abandon_after in requests.items():
                begin_listening(pipe, request_id, abandon_after)
                pipe.pttl(listener_key(request_id))
            left = pipe.execute()[num_before + 1 :: 2]
        return {
            request_id: LISTENER_SECONDS - milliseconds / 1000
            for request_id, milliseconds in zip(requests, left, strict=True)
        }
