"""`DailyBudgets`: refuses the requests of an API key that has used its tokens of the day."""

import contextlib
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from headrace_broker import AsyncClient, QueueUnavailableError
from headrace_broker.usage.budgets import BudgetDecision
from headrace_gateway.errors import ApiError
from headrace_gateway.http.broker_errors import NO_RETRY, REFUSALS
from headrace_gateway.keys.api_key import ApiKey
from headrace_wire.codes import GatewayCode


@dataclass(slots=True)
class Sending:
    """How far a call has sent the requests for which tokens are reserved."""

    has_begun: bool = False
    """Whether they may be in the queue. After one of `REFUSALS` they are not."""
    accepted: Collection[str] = ()
    """The ids under which the queue has them: earlier ones if their Idempotency-Keys were used before."""


class DailyBudgets:
    """Shared by all replicas through Redis. Keys without a budget need no call to Redis."""

    def __init__(self, client: AsyncClient) -> None:
        self._client: Final = client

    async def reserve(self, key: ApiKey, model: str, tokens: Mapping[str, int], seconds: float) -> Collection[str]:
        """Reserve tokens before requests are put into the queue. The worker that ends one replaces its reservation.

        Args:
            model: served name.
            tokens: by request id: the most tokens that it may use.
            seconds: time after which the requests expire.

        Returns the requests that had no reservation before. Raises ApiError 429 if nothing is left of the budget, and
        QueueUnavailableError.
        """
        if key.tokens_per_day is None:
            return ()
        found = await self._client.reserve_tokens(key.name, model, tokens, budget=key.tokens_per_day, seconds=seconds)
        if not found.is_admitted:
            raise _refused(key, found)
        return found.made

    @contextlib.asynccontextmanager
    async def reserved(
        self,
        key: ApiKey,
        model: str,
        tokens: Mapping[str, int],
        seconds: float,
        idempotency_keys: Sequence[str | None],
    ) -> AsyncIterator[Sending]:
        """Reserve like `reserve_once` while requests are sent, and release what was not put into the queue."""
        made = await self.reserve_once(key, model, tokens, seconds, idempotency_keys)
        sending = Sending()
        try:
            yield sending
        except BaseException as error:
            if not sending.has_begun or isinstance(error, REFUSALS):
                await self.release(key, model, made)
            raise
        await self.release(key, model, {*made} - {*sending.accepted})

    async def reserve_once(
        self,
        key: ApiKey,
        model: str,
        tokens: Mapping[str, int],
        seconds: float,
        idempotency_keys: Sequence[str | None],
    ) -> Collection[str]:
        """Reserve like `reserve`, for requests with an Idempotency-Key each, or None.

        Requests that were sent before need no budget. A key that is bound to a request that was not sent, as the
        queue was full, reserves for that request: this one is sent with its id.
        """
        names = [name for name in idempotency_keys if name is not None]
        if key.tokens_per_day is not None and names:
            bound = await self._client.bound_requests(model, key.tenant, names)
            pairs = [pair or (request_id, False) for pair, request_id in zip(bound, tokens, strict=True)]
            numbers = zip(pairs, tokens.values(), strict=True)
            tokens = {request_id: number for (request_id, was_sent), number in numbers if not was_sent}
        return await self.reserve(key, model, tokens, seconds) if tokens else ()

    async def release(self, key: ApiKey, model: str, request_ids: Collection[str]) -> None:
        """End the reservations of requests that were not put into the queue. Without Redis they expire later."""
        if key.tokens_per_day is not None and request_ids:
            with contextlib.suppress(QueueUnavailableError):
                await self._client.release_tokens(key.name, model, request_ids)


def _refused(key: ApiKey, found: BudgetDecision) -> ApiError:
    message = f"the key {key.name} may use {key.tokens_per_day} tokens a day, and has used {found.used} today"
    if key.tokens_per_day is not None and found.used < key.tokens_per_day:
        message += f"; its open requests may use {found.reserved}: try again when they have ended"
        headers = {"retry-after": "1"}
    else:
        message += f"; the day ends in {found.seconds_left} s, at 00:00 UTC"
        headers = {"retry-after": str(found.seconds_left), **NO_RETRY}
    return ApiError(429, GatewayCode.INSUFFICIENT_QUOTA, GatewayCode.INSUFFICIENT_QUOTA, message, headers=headers)
