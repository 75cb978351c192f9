"""`Arrivals`: the requests of a simulation, their sizes and the times at which they are sent."""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from random import Random


@dataclass(slots=True, eq=False)
class Request:
    """A request and what has become known of it. Times are seconds of the simulation."""

    number: int
    sent_at: float
    num_outputs: int
    num_prompt: int
    session: int = -1
    """The conversation that it continues, or -1."""
    num_cached: int = 0
    """Tokens of the prompt that are in the cache of the worker that has served the earlier turns."""
    skipped: int = 0
    """How often a fetch preferred a later message, because of its prefix."""
    num_done: int = 0
    """Output tokens that its client has."""
    worker: int = -1
    """The worker that has it, or had it last."""
    router: int = 0
    first_at: float | None = None
    ended_at: float | None = None
    num_served: int = 0
    """How often it has ended. It must end once."""

    @property
    def num_left(self) -> int:
        return self.num_outputs - self.num_done


@dataclass(frozen=True)
class Sizes:
    """Lognormal lengths in tokens. No policy knows them before."""

    output_median: float = 150.0
    output_sigma: float = 1.0
    most_outputs: int = 2000
    prompt_median: float = 400.0
    prompt_sigma: float = 0.9
    most_prompt: int = 8000
    least_prompt: int = 1

    def draw(self, random: Random) -> tuple[int, int]:
        """Draw the tokens of an output and of a prompt."""
        outputs = int(random.lognormvariate(math.log(self.output_median), self.output_sigma))
        prompt = int(random.lognormvariate(math.log(self.prompt_median), self.prompt_sigma))
        return max(1, min(self.most_outputs, outputs)), max(self.least_prompt, min(self.most_prompt, prompt))

    def sample(self) -> list[tuple[int, int]]:
        """Return the same 20,000 pairs at each call, for means."""
        return _sample(self)


@cache
def _sample(sizes: Sizes) -> list[tuple[int, int]]:
    random = Random(0)
    return [sizes.draw(random) for _ in range(20_000)]


@dataclass
class Arrivals:
    """Poisson arrivals.

    Args:
        rate: requests a second.
        burst: so many requests are sent at once, and bursts are as much rarer.
        turns: requests of a conversation. Each turn has the tokens of the turns before it in its prompt, and is sent
            after a pause of `think_seconds` on average. 1: no conversations.
    """

    rate: float
    count: int
    sizes: Sizes = field(default_factory=Sizes)
    burst: int = 1
    turns: int = 1
    think_seconds: float = 15.0

    def requests(self, random: Random) -> Iterator[Request]:
        """Yield `count` requests in the order in which they are sent.

        The pauses of a conversation are drawn before its answers are known, so that all policies get the same arrivals.
        """
        later: list[tuple[float, int, int, int]] = []  # time, session, turn, tokens of the earlier turns
        now, session, number = 0.0, 0, 0
        starts = self.rate / (self.burst * self.turns)
        next_start = random.expovariate(starts)
        while number < self.count:
            if later and later[0][0] < next_start:
                now, conversation, turn, known = heapq.heappop(later)
                group = [(conversation, turn, known)]
            else:
                now, next_start = next_start, next_start + random.expovariate(starts)
                group = [(session + each, 0, 0) for each in range(self.burst)]
                session += self.burst
            for conversation, turn, known in group:
                outputs, prompt = self.sizes.draw(random)
                is_session = self.turns > 1
                request = Request(number, now, outputs, known + prompt, conversation if is_session else -1, known)
                number += 1
                yield request
                if turn + 1 < self.turns:
                    pause = random.expovariate(1 / self.think_seconds) + _ANSWER_SECONDS * outputs
                    heapq.heappush(later, (now + pause, conversation, turn + 1, known + prompt + outputs))


_ANSWER_SECONDS = 0.03
"""Seconds a token, for which the client reads the answer before it thinks of its next turn."""
