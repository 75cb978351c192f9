"""`Watcher`: a subscriber with a clock, which survives everything that happens to the server."""

import threading
import time
from collections.abc import Callable, Sequence

import redis

from headrace_broker.keys import stream_key


class Watcher:
    """Reads streams, those of each server on a thread of its own, and notes when each chunk came.

    Args:
        url_of: returns the URL of the server of a request's stream.
    """

    def __init__(self, url_of: Callable[[str], str], request_ids: Sequence[str]) -> None:
        self._last = {stream_key(request_id): "0-0" for request_id in request_ids}
        self._ids = {stream_key(request_id).encode(): request_id for request_id in request_ids}
        self.arrivals: dict[str, list[float]] = {request_id: [] for request_id in request_ids}
        self.ended: set[str] = set()
        self._stopped = threading.Event()
        by_url: dict[str, list[str]] = {}
        for request_id in request_ids:
            by_url.setdefault(url_of(request_id), []).append(request_id)
        self._threads = [
            threading.Thread(target=self._run, args=each, name="watcher", daemon=True) for each in by_url.items()
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

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

    def _run(self, url: str, request_ids: list[str]) -> None:
        while not self._stopped.is_set() and not self.ended.issuperset(request_ids):
            client = redis.Redis.from_url(url, socket_timeout=5, protocol=2)
            try:
                while not self._stopped.is_set() and not self.ended.issuperset(request_ids):
                    self._take(client.xread(self._open(request_ids), block=200))
            except redis.RedisError:
                time.sleep(0.02)  # the server is away
            finally:
                client.close()

    def _open(self, request_ids: list[str]) -> dict[str, str]:
        return {stream_key(each): self._last[stream_key(each)] for each in request_ids if each not in self.ended}

    def _take(self, reply: list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]) -> None:
        now = time.monotonic()
        for key, entries in reply:
            request_id = self._ids[key]
            self._last[key.decode()] = entries[-1][0].decode()
            self.arrivals[request_id] += [now] * sum(fields[b"type"] == b"chunk" for _, fields in entries)
            if entries[-1][1][b"type"] == b"end":
                self.ended.add(request_id)
