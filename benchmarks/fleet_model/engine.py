"""`SimulatedEngine`: the steps of one worker's engine with continuous batching and chunked prefill."""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from fleet_model.arrivals import Request

MOST_SESSIONS = 256
"""Conversations whose tokens an engine keeps in its prefix cache."""


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step: `base`, and more for each running request and each token of a prompt."""

    base: float = 0.012
    per_request: float = 0.00025
    per_prompt_token: float = 0.00004

    def seconds(self, num_running: int, num_prompt: int) -> float:
        return self.base + self.per_request * num_running + self.per_prompt_token * num_prompt


class SimulatedEngine:
    """Runs requests in steps. Each step gives each running request one token.

    Steps in which nothing changes are one event: a request that arrives meanwhile shortens it to the current step.

    Args:
        at: calls a function at a time of the simulation.
        on_step: called with the requests that have ended, after each event.
        speed: 0.5 makes each step take twice as long.
    """

    def __init__(
        self,
        at: Callable[[float, Callable[[], None]], None],
        on_step: Callable[[float, list[Request]], None],
        *,
        slots: int,
        step_tokens: int,
        cost: StepCost,
        speed: float = 1.0,
    ) -> None:
        self._at, self._on_step = at, on_step
        self._slots, self._step_tokens = slots, step_tokens
        self._cost, self._speed = cost, speed
        self._waiting: deque[Request] = deque()
        self._prefilling: dict[Request, int] = {}
        """Tokens of their prompts that are left."""
        self._decoding: list[tuple[int, int, Request]] = []
        """Heap of the step after which each request ends."""
        self._completing: list[Request] = []
        """Requests whose prompt is complete after the current step."""
        self._cache: OrderedDict[int, int] = OrderedDict()
        self._step = 0
        self._begun_at, self._seconds, self._num_steps = 0.0, 0.0, 0
        self._epoch = 0
        self.is_busy = False
        self.num_waiting = 0
        """Requests that the last step could not begin with, by the statistics that the worker gets at its end."""
        self._num_left_out = 0
        self._num_ended = 0
        self.num_hits = 0
        """Requests of which the prefix was in the cache."""

    @property
    def slots_used(self) -> int:
        """Requests that the engine has."""
        return len(self._waiting) + len(self._prefilling) + len(self._decoding)

    @property
    def num_for_next_step(self) -> int:
        """Requests that the engine got while it computed a step."""
        return len(self._waiting) - self._num_left_out

    @property
    def num_ended(self) -> int:
        """Requests that ended with the last step; 0 if the engine is idle since then."""
        return self._num_ended if self.slots_used else 0

    @property
    def num_prompt_left(self) -> int:
        """Tokens of prompts to compute."""
        waiting = sum(request.num_prompt for request in self._waiting)
        return waiting + sum(self._prefilling.values())

    def requests(self) -> list[Request]:
        return [*self._waiting, *self._prefilling, *(request for *_, request in self._decoding)]

    def has_session(self, session: int) -> bool:
        return session in self._cache

    def give(self, request: Request, now: float) -> None:
        self._waiting.append(request)
        if not self.is_busy:
            self._num_ended = 0
            self._begin(now)
        elif self._num_steps > 1:  # end after the current step, and begin the next one with this request
            steps = int((now - self._begun_at) / self._seconds) + 1
            if steps < self._num_steps:
                self._num_steps = steps
                self._schedule()

    def populate(self, requests: list[Request], now: float) -> None:
        """Begin with requests whose prompts are computed."""
        for request in requests:
            heapq.heappush(self._decoding, (self._step + request.num_left, request.number, request))
        if requests:
            self._begin(now)

    def stop(self, now: float) -> list[Request]:
        """Lose all requests, and return them. Tokens of whole steps have reached the clients."""
        if self.is_busy:
            self._step += min(self._num_steps - 1, int((now - self._begun_at) / self._seconds))
        lost = self.requests()
        for end, _, request in self._decoding:
            request.num_done = request.num_outputs - (end - self._step)
        self._waiting.clear()
        self._prefilling.clear()
        self._decoding.clear()
        self._completing.clear()
        self._cache.clear()
        self._epoch += 1
        self.is_busy, self.num_waiting, self._num_left_out, self._num_ended = False, 0, 0, 0
        return lost

    def _begin(self, now: float) -> None:
        room = self._slots - len(self._prefilling) - len(self._decoding)
        budget = self._step_tokens - len(self._decoding)
        num_prompt = 0
        self._completing = []
        for request in list(self._prefilling):
            num_prompt += self._prefill(request, budget - num_prompt)
        while self._waiting and room > 0 and num_prompt < budget:
            request = self._waiting.popleft()
            self._prefilling[request] = request.num_prompt + request.num_done - self._cached(request)
            num_prompt += self._prefill(request, budget - num_prompt)
            room -= 1
        self._num_left_out = len(self._waiting)
        num_running = len(self._prefilling) + len(self._decoding)
        self.is_busy = num_running > 0
        if not self.is_busy:
            return
        is_changing = bool(self._prefilling)
        self._num_steps = 1 if is_changing else self._decoding[0][0] - self._step
        self._begun_at = now
        self._seconds = self._cost.seconds(num_running, num_prompt) / self._speed
        self._schedule()

    def _prefill(self, request: Request, budget: int) -> int:
        tokens = min(self._prefilling[request], budget)
        self._prefilling[request] -= tokens
        if self._prefilling[request] <= 0 < tokens:
            self._completing.append(request)
        return tokens

    def _cached(self, request: Request) -> int:
        """Return the cached tokens of the prompt. At least its last one has to be computed."""
        if request.session < 0:
            return 0
        cached = self._cache.pop(request.session, 0)
        self._cache[request.session] = request.num_prompt + request.num_outputs
        while len(self._cache) > MOST_SESSIONS:
            self._cache.popitem(last=False)
        self.num_hits += bool(cached)
        return min(cached, request.num_cached, request.num_prompt - 1)

    def _schedule(self) -> None:
        self._epoch += 1
        epoch = self._epoch
        end = self._begun_at + self._num_steps * self._seconds

        def complete() -> None:
            if epoch == self._epoch:
                self._complete(end)

        self._at(end, complete)

    def _forget_ended(self) -> None:
        self._num_ended = 0

    def _complete(self, now: float) -> None:
        self._step += self._num_steps
        ended: list[Request] = []
        while self._decoding and self._decoding[0][0] <= self._step:
            ended.append(heapq.heappop(self._decoding)[2])
        for request in self._completing:
            del self._prefilling[request]
            request.num_done += 1
            if request.first_at is None:
                request.first_at = now
            if request.num_left:
                heapq.heappush(self._decoding, (self._step + request.num_left, request.number, request))
            else:
                ended.append(request)
        self.num_waiting = self._num_left_out
        self._num_ended = len(ended)
        self._begin(now)
        if ended and self.is_busy and self._num_steps > 1:
            self._at(self._begun_at + self._seconds, self._forget_ended)
        self._on_step(now, ended)
