"""`EngineLosses`: records in Redis how many engine processes died with a request in them.

Without this, a request that kills engines would start with a count of zero at each worker.
"""

from collections.abc import Mapping
from typing import Final

import redis

from headrace_broker.keys import ENGINE_LOSSES_SECONDS, engine_losses_key


class EngineLosses:
    """Writes the counts; `StreamWriter.claim` reads them. Redis's errors pass through."""

    def __init__(self, client: "redis.Redis") -> None:
        self._client: Final = client

    def record(self, losses: Mapping[str, int]) -> None:
        """Store the counts by request id. They include the losses on other workers. The call may be repeated."""
        with self._client.pipeline(transaction=False) as pipe:
            for request_id, count in losses.items():
                pipe.set(engine_losses_key(request_id), count, ex=ENGINE_LOSSES_SECONDS)
            pipe.execute()

    def forget(self, request_id: str) -> None:
        """Delete the count of a request that has proved not to kill engines."""
        self._client.delete(engine_losses_key(request_id))
