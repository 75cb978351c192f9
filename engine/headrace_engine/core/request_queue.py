"""Waiting requests in the order in which they are admitted: by arrival, or by priority and then arrival."""

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from headrace_engine.config import SchedulingPolicy
from headrace_engine.request import Request


class RequestQueue(Protocol):
    def add(self, request: Request) -> None: ...

    def add_first(self, request: Request) -> None:
        """Put a preempted request back: it keeps its place before those that arrived later."""

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

    def pop(self) -> Request:  # type: ignore[override]  # a queue is served from its head
        return self.popleft()


class PriorityQueue:
    """Lowest priority number first; within one number by arrival time."""

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
