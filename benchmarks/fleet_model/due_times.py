"""Work with due times beside chats: the arrivals, and three orders of a queue's messages.

Four kinds of requests share a model: chats, and work in the background that is due after a short or a long window, or
that has no due time. Chats arrive one by one, more at noon than at midnight, and the work in small bursts.
"""

import heapq
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from random import Random
from typing import Any

from fleet_model.arrivals import Request, Sizes
from fleet_model.fleet import QUANTUM, Fleet, Plan

CHAT, SHORT, LONG, NONE = "chat", "short window", "long window", "no due time"
KINDS = (CHAT, SHORT, LONG, NONE)
BACKGROUND = (SHORT, LONG, NONE)
FIFO, FIXED, DUE, ALONE = "fifo", "fixed priorities", "due times", "chats alone"
ORDERS = (FIFO, FIXED, DUE, ALONE)
"""`FIFO`: one priority for all. `FIXED`: chats first, then the short window, the long one, and the rest. `DUE`: chats
first, and all other work at the lowest priority, with its due times. `ALONE`: the chats without the other work."""
FIXED_PRIORITIES = {CHAT: 0, SHORT: 3, LONG: 6, NONE: 9}
_SHARES = {SHORT: 0.5, LONG: 0.4, NONE: 0.1}
_BURST_SECONDS = 5.0
"""A burst of the simulation is the work of all workers for so long."""
_WARM_SHARE = 0.1
"""Share of the time at the beginning whose requests are not counted."""


def expected_times() -> float:
    """Read from the product's script how many expected times a message gets."""
    text = files("headrace_broker").joinpath("lua", "due_prelude.lua").read_text(encoding="utf-8")
    found = re.search(r"local EXPECTED_TIMES = (\d+)", text)
    assert found is not None, "due_prelude.lua no longer declares EXPECTED_TIMES"
    return float(found[1])


@dataclass(frozen=True)
class Work:
    """What arrives. All times are in seconds."""

    slots: int
    """Of all workers together."""
    slot_seconds: float
    """How long a request uses a slot, on average."""
    seconds: float
    """For which requests are sent."""
    short: float
    """The short window."""
    long: float
    day: float
    """The rate of chats rises and falls once in this time."""
    burst: int
    """Requests of a kind of background work that are sent at once."""
    load: float = 0.9
    chats: float = 0.5
    """Share of the load that are chats, on average."""
    swing: float = 0.8
    """At noon the rate of chats is higher than its mean by this share, and at midnight as much lower."""
    sizes: Sizes = field(default_factory=Sizes)

    @property
    def rate(self) -> float:
        """Requests a second."""
        return self.load * self.slots / self.slot_seconds

    def window(self, kind: str) -> float | None:
        return {SHORT: self.short, LONG: self.long}.get(kind)

    def arrivals(self, random: Random) -> list[tuple[Request, str]]:
        """Return requests with their kinds in the order in which they are sent."""
        times: list[tuple[float, str]] = []
        for kind in KINDS:
            is_chat = kind == CHAT
            share = self.chats if is_chat else (1 - self.chats) * _SHARES[kind]
            size = 1 if is_chat else self.burst
            highest = (1 + self.swing) if is_chat else 1.0
            mean, now = size / (self.rate * share * highest), 0.0
            while (now := now + random.expovariate(1 / mean)) < self.seconds:
                if not is_chat or random.random() * highest < 1 + self.swing * math.sin(2 * math.pi * now / self.day):
                    times += [(now, kind)] * size
        times.sort()
        return [(Request(number, at, *self.sizes.draw(random)), kind) for number, (at, kind) in enumerate(times)]


class ByPriority:
    """Messages by fixed priorities, and of each in the order of their arrival."""

    def __init__(self, priorities: dict[int, int]) -> None:
        self._priorities = priorities
        """By number of a request."""
        self._heap: list[tuple[int, int, Request]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (request for *_, request in sorted(self._heap))

    def append(self, request: Request) -> None:
        heapq.heappush(self._heap, (self._priorities[request.number], request.number, request))

    appendleft = append

    def popleft(self) -> Request:
        return heapq.heappop(self._heap)[-1]

    def remove(self, request: Request) -> None:
        self._heap.remove((self._priorities[request.number], request.number, request))
        heapq.heapify(self._heap)


class ByDueTime:
    """Messages as `lua/due_prelude.lua` orders them for one tenant: chats, urgent messages, all others.

    Args:
        now: returns the time.
        kinds: by number of a request.
    """

    def __init__(self, now: Callable[[], float], work: Work, kinds: Sequence[str]) -> None:
        self._now, self._work, self._kinds = now, work, kinds
        self._allowance = expected_times() * work.slot_seconds
        # on average, chats leave the other slots to the background
        self._interval = work.slot_seconds / (work.slots * (1 - work.load * work.chats))
        self._chats: list[tuple[float, int, Request]] = []
        self._urgent: list[tuple[float, int, Request]] = []
        self._late: list[tuple[float, int, Request]] = []
        self._due: list[tuple[float, int, Request]] = []
        """By latest start."""
        self._places: list[int] = []
        """Of the requests of `_due` among all, by arrival. The one with the least slack takes the first of them."""
        self._without: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        return sum(map(len, (self._chats, self._urgent, self._late, self._due, self._without)))

    def __iter__(self) -> Iterator[Request]:
        return (request for *_, request in (*self._chats, *self._urgent, *self._late, *self._due, *self._without))

    def append(self, request: Request) -> None:
        kind = self._kinds[request.number]
        window = self._work.window(kind)
        if window is None:
            where = self._chats if kind == CHAT else self._without
            heapq.heappush(where, (request.sent_at, request.number, request))
        else:
            start = request.sent_at + window - self._allowance
            heapq.heappush(self._due, (start, request.number, request))
            heapq.heappush(self._places, request.number)

    appendleft = append

    def popleft(self) -> Request:
        too_late = self._now() - self._allowance + self._work.slot_seconds
        while self._urgent and self._urgent[0][0] < too_late:
            heapq.heappush(self._late, heapq.heappop(self._urgent))
        while self._due and self._due[0][0] < too_late:
            heapq.heappush(self._late, self._moved_up())
        if self._must_start():
            heapq.heappush(self._urgent, self._moved_up())
        for first in (self._chats, self._urgent, self._late):
            if first:
                return heapq.heappop(first)[-1]
        if self._without and (not self._places or self._without[0][1] < self._places[0]):
            return heapq.heappop(self._without)[-1]
        heapq.heappop(self._places)
        return heapq.heappop(self._due)[-1]

    def _moved_up(self) -> tuple[float, int, Request]:
        """Take the message with the least slack, and leave the other ones their places."""
        first = heapq.heappop(self._due)
        self._places.remove(first[1] if first[1] in self._places else self._places[0])
        heapq.heapify(self._places)
        return first

    def _must_start(self) -> bool:
        """Return whether the first message must start, for itself or for those behind it, as the script decides."""
        if not self._due:
            return False
        now, place, last = self._now(), 0, len(self._due) - 1
        if self._due[0][0] <= now:
            return True
        starts = sorted(start for start, *_ in self._due)
        while place <= last:
            if starts[place] - place * self._interval <= now:
                return True
            place = last + 1 if place == last else min(2 * place + 1, last)
        return False

    def remove(self, request: Request) -> None:
        raise NotImplementedError("only prefix affinity takes another message than the next one")


def simulate(order: str, work: Work, plan: Plan, seed: int) -> dict[str, Any]:
    """Simulate the work in one order of the queue. Returns the figures of `figures_of`."""
    arrivals = work.arrivals(Random(seed))
    kinds = [kind for _, kind in arrivals]
    requests = [request for request, kind in arrivals if order != ALONE or kind == CHAT]

    def messages(now: Callable[[], float]) -> ByPriority | ByDueTime:
        if order == DUE:
            return ByDueTime(now, work, kinds)
        return ByPriority({each: FIXED_PRIORITIES[kind] if order == FIXED else 0 for each, kind in enumerate(kinds)})

    Fleet(plan, seed, messages).run(requests)
    ended = [(kinds[request.number], request) for request in requests]
    assert all(request.num_served == 1 for request in requests)
    return figures_of(order, work, ended)


def figures_of(order: str, work: Work, ended: Sequence[tuple[str, Request]]) -> dict[str, Any]:
    """Return the shares of due times that were met, the TTFT of chats, and the latency of work without a due time."""
    counted = [(kind, request) for kind, request in ended if request.sent_at >= _WARM_SHARE * work.seconds]
    figures: dict[str, Any] = {"order": order, "requests": len(counted)}
    for kind, name in ((SHORT, "short_met"), (LONG, "long_met")):
        window = work.window(kind)
        met = [request.ended_at - request.sent_at <= window for each, request in counted if each == kind]  # type: ignore[operator]
        figures[name] = round(100 * sum(met) / len(met), 1) if met else None
    first = sorted(1000 * (request.first_at - request.sent_at) for kind, request in counted if kind == CHAT)  # type: ignore[operator]
    rest = sorted(request.ended_at - request.sent_at for kind, request in counted if kind == NONE)  # type: ignore[operator]
    for percent in (50, 95):
        figures[f"chat_ttft_ms_p{percent}"] = round(first[len(first) * percent // 100], 1)
    figures["none_latency_s_p50"] = round(rest[len(rest) // 2], 1) if rest else None
    return figures


def simulated_work(num_workers: int, slots: int, *, seconds: float) -> tuple[Work, Plan]:
    """Return the work for a simulated fleet. A minute stands for an hour."""
    plan = Plan(policy=QUANTUM, num_workers=num_workers, slots=slots)
    sizes = Sizes()
    sample = sizes.sample()
    outputs = sum(output for output, _ in sample) / len(sample)
    prompt = sum(prompt for _, prompt in sample) / len(sample)
    slot_seconds = outputs * plan.cost.seconds(slots, 0) + slots * prompt * plan.cost.per_prompt_token
    burst = int(_BURST_SECONDS * num_workers * slots / slot_seconds)
    slots_of_all = num_workers * slots
    work = Work(slots_of_all, slot_seconds, seconds, short=120.0, long=480.0, day=1440.0, burst=burst, sizes=sizes)
    return work, plan
