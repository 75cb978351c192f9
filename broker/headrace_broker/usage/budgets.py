"""`Budgets`: reserves the tokens of requests against the budget that an API key has for a day.

A request reserves what it may use at most. The script that ends its lease replaces the reservation by what it has used.
A key is admitted while the sum is less than its budget. So it is exceeded by no more than the reservations of requests
that ran together.
"""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from headrace_broker.keys import reserved_key
from headrace_broker.scripts import script
from headrace_broker.server.connections import CONNECTION_ERRORS
from headrace_broker.server.queue_servers import QueueServers

RESERVE: Final = script("key_checks", "budget_prelude", "budget_reserve")
RELEASE: Final = script("key_checks", "budget_prelude", "budget_release")
_LATE_SECONDS: Final = 60
"""How long a reservation outlives the deadline of its request, which its worker may notice late."""


@dataclass(frozen=True, slots=True)
class BudgetDecision:
    """Whether requests are admitted."""

    is_admitted: bool
    used: int
    """Tokens of requests that ended today."""
    reserved: int
    """Tokens that open requests may still use."""
    seconds_left: int
    """Seconds until the next day, which begins with the whole budget."""
    made: frozenset[str]
    """The requests that had no reservation before."""


class Budgets:
    """Budgets on the servers of the queues. Redis's errors pass through. Threads may share it."""

    def __init__(self, servers: QueueServers) -> None:
        self._servers: Final = servers

    def reserve(
        self, key_name: str, queue: str, tokens: Mapping[str, int], *, budget: int, seconds: float
    ) -> BudgetDecision:
        """Reserve the tokens of all requests, or of none. A server that is away counts as 0 for the queues of others.

        Args:
            tokens: by request id: the tokens of prompt and output that it may use at most.
            budget: tokens of the key for a day (UTC, by Redis's clock).
            seconds: time after which the requests expire.
        """
        own = self._servers.of(queue)
        others = []
        for server in self._servers:
            if server is not own:
                with suppress(*CONNECTION_ERRORS):  # a server that is away must not stop the queues of the others
                    others.append(self._run(server, key_name, {}, 0, 0, 0))
        elsewhere = sum(each.used + each.reserved for each in others)
        found = self._run(own, key_name, tokens, budget, elsewhere, int(seconds) + _LATE_SECONDS)
        used, reserved = (sum(getattr(each, name) for each in (found, *others)) for name in ("used", "reserved"))
        return BudgetDecision(found.is_admitted, used, reserved, found.seconds_left, found.made)

    def release(self, key_name: str, queue: str, request_ids: Collection[str]) -> None:
        """End the reservations of requests that were not put into the queue."""
        if request_ids:
            RELEASE.bound(self._servers.of(queue))(key_name, *request_ids, reserved=reserved_key(key_name))

    def _run(
        self, server: Any, key_name: str, tokens: Mapping[str, int], budget: int, elsewhere: int, seconds: int
    ) -> BudgetDecision:
        pairs = [value for pair in tokens.items() for value in pair]
        reply = RESERVE.bound(server)(key_name, budget, elsewhere, seconds, *pairs, reserved=reserved_key(key_name))
        is_admitted, used, reserved, seconds_left, made = reply
        return BudgetDecision(
            bool(is_admitted), used, reserved, seconds_left, frozenset(request_id.decode() for request_id in made)
        )
