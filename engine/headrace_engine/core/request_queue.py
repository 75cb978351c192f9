"""The queue of waiting requests, ordered by arrival or by priority, and the limits of its size."""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol

from headrace_engine.errors import EngineFullError
from headrace_engine.options.config import SchedulingPolicy
from headrace_engine.requests.request import Request, RequestState


class RequestQueue(Protocol):
    def add(self, request: Request) -> None: ...

    def add_first(self, request: Request) -> None:
        """Return a preempted request to its place before all requests that arrived later."""

    def peek(self) -> Request: ...

    def pop(self) -> Request: ...

    def remove(self, request: Request) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FCFSQueue(deque[Request]):
    """First come, first served."""

    def add(self, request: Request) -> None:
        self.append(request)

    def add_first(self, request: Request) -> None:
        self.appendleft(request)

    def peek(self) -> Request:
        return self[0]

    def pop(self) -> Request:  # type: ignore[override]  # deque.pop takes from the other end
        return self.popleft()


class PriorityQueue:
    """Lowest priority number first, then earliest arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, str, Request]] = []

    def add(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.priority, request.arrival_time, request.request_id, request))

    add_first = add

    def peek(self) -> Request:
        return self._heap[0][3]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[3]

    def remove(self, request: Request) -> None:
        self._heap = [entry for entry in self._heap if entry[3] is not request]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (entry[3] for entry in sorted(self._heap, key=lambda entry: entry[:3]))


def create_request_queue(policy: SchedulingPolicy) -> RequestQueue:
    return PriorityQueue() if policy == "priority" else FCFSQueue()


class QueueLimits:
    """Limits the requests that wait for their first admission, including those that wait for a grammar or an adapter.

    Preempted requests do not count.

    Args:
        max_requests, max_tokens: None means no limit.
    """

    def __init__(self, max_requests: int | None, max_tokens: int | None) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._entered: dict[str, int] = {}
        """Tokens by request id."""
        self._num_tokens = 0

    def enter(self, request_id: str, num_tokens: int) -> None:
        """Count a new request, once. Raises EngineFullError, without counting it, if it exceeds a limit."""
        if request_id in self._entered:
            return
        if self._max_requests is not None and len(self._entered) >= self._max_requests:
            raise EngineFullError("max_num_queued_requests", self._max_requests, f"{len(self._entered)} requests wait")
        if self._max_tokens is not None and self._num_tokens + num_tokens > self._max_tokens:
            waiting = f"{self._num_tokens} tokens wait and the request has {num_tokens}"
            raise EngineFullError("max_num_queued_tokens", self._max_tokens, waiting)
        self._entered[request_id] = num_tokens
        self._num_tokens += num_tokens

    def leave(self, request_id: str) -> None:
        """Stop counting a request. Unknown ids are ignored."""
        self._num_tokens -= self._entered.pop(request_id, 0)

    def check_integrity(self, waiting: Iterable[Request], elsewhere: Iterable[str]) -> None:
        """Assert that the counted requests are exactly the new ones in `waiting` and those with ids in `elsewhere`."""
        new = {request.request_id for request in waiting if request.status is RequestState.WAITING}
        assert self._entered.keys() == new | set(elsewhere), self._entered.keys() ^ (new | set(elsewhere))
        assert self._num_tokens == sum(self._entered.values())
