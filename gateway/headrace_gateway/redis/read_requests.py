"""Lets the streams and results of requests expire early, once nobody reads them again."""

from collections.abc import Iterable
from typing import Final

from headrace_broker.keys import ended_key, result_key, stream_key
from headrace_broker.server.asking_homes import unless_away_async
from headrace_broker.server.shards import id_in_keys
from headrace_broker.server.stream_servers import AsyncStreamServers
from headrace_broker.server.stream_table import MAIN
from headrace_gateway.background_task import poll

_KEPT_SECONDS: Final = 30
"""Seconds for which Redis still keeps them, for `headrace status`."""
_ROUND_SECONDS: Final = 2.0


async def expire_requests(streams: AsyncStreamServers, request_ids: Iterable[str]) -> None:
    """Shorten the lives of the requests' keys. Raises redis-py's errors, unless a stream server is away."""
    request_ids = list(request_ids)
    for home, there in {**await streams.by_home(request_ids), MAIN: request_ids}.items():
        async with unless_away_async(home), (await streams.of(home)).pipeline(transaction=False) as pipe:
            for name in (id_in_keys(home, request_id) for request_id in there):
                for key in (stream_key(name), result_key(name), ended_key(name)):
                    pipe.expire(key, _KEPT_SECONDS, lt=True)
            await pipe.execute()


class ReadRequests:
    """The requests whose answers this replica has read, and that no client can read again.

    A worker stores the result of a request after the end of its stream. So the keys are touched a round later. If the
    replica stops before, or Redis is unavailable, they expire by themselves.
    """

    def __init__(self, streams: AsyncStreamServers) -> None:
        self._streams: Final = streams
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
            await expire_requests(self._streams, due)
        return False
