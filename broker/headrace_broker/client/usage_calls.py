"""`UsageCalls`: the client's calls to the usage ledger and to the budgets of API keys.

It imports both on first use, because most clients only send requests and read streams.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final

from headrace_broker.client.idempotency import IdempotencyKeys
from headrace_broker.client.unavailable import unavailable
from headrace_broker.keys import queue_name
from headrace_broker.server.queue_servers import QueueServers
from headrace_broker.settings import BrokerSettings

if TYPE_CHECKING:
    from headrace_broker.usage.budgets import BudgetDecision, Budgets
    from headrace_broker.usage.ledger import Usages


class UsageCalls:
    """A part of `Client`. Every method raises QueueUnavailableError if Redis cannot be reached."""

    def __init__(self, settings: BrokerSettings, servers: QueueServers, idempotency: IdempotencyKeys) -> None:
        self.settings: Final = settings
        self._servers: Final = servers
        self._idempotency: Final = idempotency

    @cached_property
    def _budgets(self) -> Budgets:
        from headrace_broker.usage.budgets import Budgets

        return Budgets(self._servers)

    def usage(self, width: int, start: int, end: int) -> Usages:
        """Return what was used in the buckets of a time range, see `read_usage`."""
        from headrace_broker.usage.ledger import read_usage

        with unavailable(self.settings, "read the usage ledger"):
            return read_usage(self._servers, width, start, end)

    def reserve_tokens(
        self, key_name: str, model: str, tokens: Mapping[str, int], *, budget: int, seconds: float
    ) -> BudgetDecision:
        """Reserve tokens of an API key's budget for requests of a model, see `Budgets.reserve`."""
        with unavailable(self.settings, "read a budget"):
            return self._budgets.reserve(key_name, queue_name(model), tokens, budget=budget, seconds=seconds)

    def release_tokens(self, key_name: str, model: str, request_ids: Collection[str]) -> None:
        """End the reservations of requests that were not submitted, see `Budgets.release`."""
        with unavailable(self.settings, "release a reservation"):
            self._budgets.release(key_name, queue_name(model), request_ids)

    def bound_requests(
        self, model: str, tenant: str | None, idempotency_keys: Sequence[str]
    ) -> list[tuple[str, bool] | None]:
        """Return for each Idempotency-Key its request and whether it was sent; None for a key that is not bound."""
        with unavailable(self.settings, "read an idempotency key"):
            return [self._idempotency.bound(model, tenant, each) for each in idempotency_keys]
