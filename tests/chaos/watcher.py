"""`Watcher`: a subscriber with a clock, which survives everything that happens to the server."""

import threading
import time
from collections.abc import Sequence

import redis

from headrace_broker.keys import stream_key


class Watcher:
    """Reads streams on a thread of its own and notes when each chunk came."""

    def __init__(self, url: str, request_ids: Sequence[str]) -> None:
        self._url = url
        self._last = {stream_key(request_id): "0-0" for request_id in request_ids}
        self._ids = {stream_key(request_id).encode(): request_id for request_id in request_ids}
        self.arrivals: dict[str, list[float]] = {request_id: [] for request_id in request_ids}
        self.ended: set[str] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def num_tokens(self, request_id: str) -> int:
        """How many have come, of all choices: a chunk may have several."""
        return int(self._last[stream_key(request_id)].partition("-")[2])

    def longest_gaps(self, since: float, request_ids: Sequence[str]) -> list[float]:
        """For each request the longest silence between two chunks of which the second came after `since`."""
        gaps = []
        for request_id in request_ids:
            times = self.arrivals[request_id]
            after = [index for index, when in enumerate(times) if when > since and index > 0]
            if after:
                gaps.append(max(times[index] - max(times[index - 1], since) for index in after))
        return gaps

    def _run(self) -> None:
        while not self._stopped.is_set() and len(self.ended) < len(self._ids):
            client = redis.Redis.from_url(self._url, socket_timeout=5, protocol=2)
            try:
                while not self._stopped.is_set() and len(self.ended) < len(self._ids):
                    self._take(client.xread(self._open(), block=200))
            except redis.RedisError:
                time.sleep(0.02)  # the server is away
            finally:
                client.close()

    def _open(self) -> dict[str, str]:
        return {key: last for key, last in self._last.items() if self._ids[key.encode()] not in self.ended}

    def _take(self, reply: list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]) -> None:
        now = time.monotonic()
        for key, entries in reply:
            request_id = self._ids[key]
            self._last[key.decode()] = entries[-1][0].decode()
            self.arrivals[request_id] += [now] * sum(fields[b"type"] == b"chunk" for _, fields in entries)
            if entries[-1][1][b"type"] == b"end":
                self.ended.add(request_id)
