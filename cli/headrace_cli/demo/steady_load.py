"""`SteadyLoad`: a few requests every few seconds, so that dashboards have something to show."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace_broker.client.client import Client
from headrace_broker.errors import HeadraceBrokerError

TENANTS = ("acme", "globex")
_PRIORITIES = (0, 3, 6, 9)
_CANCELLED_SHARE = 0.05
_LONGEST_PAUSE_SECONDS = 6.0


@dataclass(slots=True)
class SteadyLoad:
    """Send requests of two tenants, with several priorities and lengths, without reading the answers.

    Args:
        redis_url: the queue.
        model: served name.
        questions: prompts, chosen at random.
        progress: called with one sentence for each error.
        sleep: waits for a number of seconds.
    """

    redis_url: str = field(repr=False)
    model: str
    questions: Sequence[str]
    progress: Callable[[str], None]
    sleep: Callable[[float], object] = time.sleep
    _random: random.Random = field(init=False, default_factory=lambda: random.Random(0))

    def run(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Send until `stopped` returns True. Report an error of Redis, and try again."""
        with Client(self.redis_url, model=self.model) as client:
            while not stopped():
                try:
                    self.send(client)
                except HeadraceBrokerError as error:
                    self.progress(str(error))
                self.sleep(self._random.uniform(0.5, _LONGEST_PAUSE_SECONDS))

    def send(self, client: Client) -> list[str]:
        """Send one to four requests at once, and cancel a few of them. Return all ids."""
        ids = client.submit_many(
            {
                "messages": [{"role": "user", "content": self._random.choice(self.questions)}],
                "sampling_params": {"max_tokens": self._random.choice((16, 48, 96, 160)), "temperature": 0.8},
                "priority": self._random.choice(_PRIORITIES),
                "tenant": self._random.choice(TENANTS),
                "expires": 60,
            }
            for _ in range(self._random.randint(1, 4))
        )
        for request_id in ids:
            if self._random.random() < _CANCELLED_SHARE:
                client.cancel(request_id)
        return ids
