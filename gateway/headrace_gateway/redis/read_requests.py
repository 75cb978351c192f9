"""Lets the streams and results of requests expire early, once nobody reads them again."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from headrace_broker.keys import ended_key, result_key, stream_key
from headrace_gateway.background_task import poll

if TYPE_CHECKING:
    import redis.asyncio

_KEPT_SECONDS: Final = 30
"""Seconds for which Redis still keeps them, for `headrace status`."""
_ROUND_SECONDS: Final = 2.0


async def expire_requests(client: "redis.asyncio.Redis", request_ids: Iterable[str]) -> None:
    """Shorten the lives of the requests' keys. Raises redis-py's errors."""
    async with client.pipeline(transaction=False) as pipe:
        for request_id in request_ids:
            for key in (stream_key(request_id), result_key(request_id), ended_key(request_id)):
                pipe.expire(key, _KEPT_SECONDS, lt=True)
        await pipe.execute()


class ReadRequests:
    """The requests whose answers this replica has read, and that no client can read again.

    A worker stores the result of a request after the end of its stream. So the keys are touched a round later. If the
    replica stops before, or Redis is unavailable, they expire by themselves.
    """

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self._client: Final = client
        self._new: list[str] = []
        self._due: list[str] = []

    def add(self, request_ids: Iterable[str]) -> None:
        self._new += request_ids

    async def run(self) -> None:
        """Work until cancelled."""
        await poll(self._expire, "read requests", seconds=_ROUND_SECONDS)

    async def _expire(self) -> bool:
        due, self._due, self._new = self._due, self._new, []
        if due:
            await expire_requests(self._client, due)
        return False
