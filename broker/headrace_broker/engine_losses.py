"""`EngineLosses`: how many engine processes died with a request in them, for whichever worker has it next.

Without this a request that kills engines would begin anew with each worker that it comes to.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from headrace_broker.keys import ENGINE_LOSSES_SECONDS, engine_losses_key

if TYPE_CHECKING:
    import redis


class EngineLosses:
    """Written here, read when a stream is claimed (`StreamWriter.claim`). Redis's errors pass through."""

    def __init__(self, client: "redis.Redis") -> None:
        self._client: Final = client

    def record(self, losses: Mapping[str, int]) -> None:
        """By request id, those on other workers among them; may be repeated."""
        with self._client.pipeline(transaction=False) as pipe:
            for request_id, count in losses.items():
                pipe.set(engine_losses_key(request_id), count, ex=ENGINE_LOSSES_SECONDS)
            pipe.execute()

    def forget(self, request_id: str) -> None:
        """The request has shown that it does not kill engines."""
        self._client.delete(engine_losses_key(request_id))
