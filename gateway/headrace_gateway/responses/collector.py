"""`ResponseCollector`: stores how each response ended before its stream expires.

Every replica runs one. They share the open responses as claims, so one replica at a time checks a response, and another
takes over if it dies. A check reads only the last entry of a stream, and does not renew the subscriber heartbeat. So a
request that nobody reads is still abandoned. The whole stream is read only after it has ended.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import structlog

from headrace_broker import HeadraceBrokerError
from headrace_broker.errors import SettingsError
from headrace_broker.keys import ended_key, stream_key
from headrace_broker.server.asking_homes import at_most_briefly
from headrace_broker.server.connections import REDIS_ERRORS
from headrace_broker.server.shards import id_in_keys
from headrace_broker.server.stream_servers import AsyncStreamServers
from headrace_broker.server.stream_table import MAIN
from headrace_gateway.answers.envelope import Envelope, EnvelopeStore, check_release
from headrace_gateway.answers.reader import LATE_SECONDS
from headrace_gateway.answers.response_store import ResponseStore
from headrace_gateway.background_task import check_cancelled, poll
from headrace_gateway.errors import ApiError
from headrace_gateway.keys.limits import RateLimits, StoredBytes
from headrace_gateway.redis.claims import Claim, Claims
from headrace_gateway.redis.keys import envelope_key
from headrace_gateway.requests.call import ResponseOptions
from headrace_gateway.responses.replay import replay
from headrace_gateway.responses.stream import ResponseStream
from headrace_monitoring.gateway_metrics import GatewayMetrics
from headrace_monitoring.logging import frames

if TYPE_CHECKING:
    import redis.asyncio

_AT_ONCE: Final = 128
"""Responses that one replica holds at a time."""
_LOOKS_PER_SECOND: Final = 500
"""Checks a second of all replicas together, so that thousands of open responses cost Redis little."""
_SHORTEST_SECONDS: Final = 1.0
_FAULT_SECONDS: Final = 30.0
"""Seconds until a response that could not be stored is tried again."""
_DEFECT_SECONDS: Final = 300.0
"""Seconds until the next try after an unexpected error."""

logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(__name__)


@dataclass(slots=True)
class _OpenResponses:
    """What the servers have of some responses."""

    last: dict[str, Any] = field(default_factory=dict)
    """The last entry of each stream that has one."""
    marked: set[str] = field(default_factory=set)
    """Those whose stream has ended, and may have expired since."""
    unread: set[str] = field(default_factory=set)
    """Those that may have a stream on a server that is away."""
    lives: dict[str, int] = field(default_factory=dict)
    """Seconds until the envelope expires."""

    def is_ready(self, item: str, late: float) -> bool:
        """Return whether a response has ended or cannot start: its envelope lives for `late` seconds at most."""
        if item in self.last:
            return bool(self.last[item][1].get(b"type") == b"end")
        return item in self.marked or (self.lives[item] <= late and item not in self.unread)


class ResponseCollector:
    """Stores the end of responses.

    Args:
        client: from the broker's `connections.connect_async`.
        streams: the servers that have the streams.
        publish: notifies webhooks that a response has ended. Repeating it has no effect.
        longest: longest time between two checks of a response, in seconds; a fraction of the life of streams.
    """

    def __init__(
        self,
        client: "redis.asyncio.Redis",
        streams: AsyncStreamServers,
        claims: Claims,
        envelopes: EnvelopeStore,
        responses: ResponseStore,
        metrics: GatewayMetrics,
        publish: Callable[..., Awaitable[None]],
        *,
        longest: float,
    ) -> None:
        self._client: Final = client
        self._streams: Final = streams
        self._claims: Final = claims
        self._envelopes: Final = envelopes
        self._responses: Final = responses
        self._metrics: Final = metrics
        self._publish: Final = publish
        self._longest: Final = longest
        self._limits: Final = RateLimits(client)
        self._stored: Final = StoredBytes(client, 0, streams)

    async def run(self) -> None:
        """Collect until cancelled."""
        await poll(self._collect_many, "responses", seconds=_SHORTEST_SECONDS)

    async def _collect_many(self) -> bool:
        return await self.collect() == _AT_ONCE

    async def collect(self) -> int:
        """Check the responses that are due, store those that have ended, and return how many were due."""
        claims = await self._claims.take(_AT_ONCE)
        num_open = await self._client.zcard(self._claims.due_key)
        self._metrics.responses_open(num_open)
        if not claims:
            return 0
        interval = min(max(_SHORTEST_SECONDS, num_open / _LOOKS_PER_SECOND), self._longest)
        ready = set(await self._ready(claims))
        await self._claims.release_all([claim for claim in claims if claim not in ready], after=interval)
        kept_at = time.monotonic()
        left = list(ready)
        while left:
            if time.monotonic() - kept_at > self._claims.seconds / 3:
                lost = await self._claims.renew(left)
                left = [claim for claim in left if claim not in lost]
                kept_at = time.monotonic()
                continue
            await self._try_finish(left.pop(), interval)
        return len(claims)

    async def _ready(self, claims: list[Claim]) -> Iterable[Claim]:
        """Return the claims of responses that have ended or can no longer start. Asks all servers at once."""
        items = [claim.item for claim in claims]
        by_home = {MAIN: list[str](), **await self._streams.by_home(items)}
        responses = _OpenResponses()
        reads = (self._read(responses, home, there, items if home == MAIN else ()) for home, there in by_home.items())
        await asyncio.gather(*reads)
        late = self._envelopes.kept_beyond - LATE_SECONDS
        return [claim for claim in claims if responses.is_ready(claim.item, late)]

    async def _read(self, to: "_OpenResponses", home: str, items: Sequence[str], enveloped: Sequence[str]) -> None:
        """Read the streams of `items` at one server and the lives of the envelopes of `enveloped`, in a round trip."""
        try:
            async with (
                at_most_briefly(home),
                (await self._streams.of(home)).pipeline(transaction=False) as pipe,
            ):
                for name in (id_in_keys(home, item) for item in items):
                    pipe.xrevrange(stream_key(name), count=1)
                    pipe.exists(ended_key(name))
                for item in enveloped:
                    pipe.ttl(envelope_key(item))
                found: list[Any] = await pipe.execute()
        except (*REDIS_ERRORS, SettingsError) as error:
            if home == MAIN:
                raise
            logger.warning("stream server not read", stream_server=home, reason=type(error).__name__)
            to.unread.update(items)
            return
        streams, lives = found[: 2 * len(items)], found[2 * len(items) :]
        to.last |= {item: entries[0] for item, entries in zip(items, streams[::2], strict=True) if entries}
        to.marked.update(item for item, has_mark in zip(items, streams[1::2], strict=True) if has_mark)
        to.lives |= dict(zip(enveloped, lives, strict=True))

    async def _try_finish(self, claim: Claim, interval: float) -> None:
        try:
            if not await self._finish(claim):
                await self._claims.release(claim, after=interval)
        except (ApiError, HeadraceBrokerError) as error:  # another release accepted it, or an entry cannot be read
            logger.warning("response not stored", id=claim.item, reason=type(error).__name__)
            await self._claims.release(claim, after=_FAULT_SECONDS)
        except REDIS_ERRORS:
            raise
        except Exception as error:  # noqa: BLE001  # one response must not keep the others from being stored
            check_cancelled()
            logger.error("response not stored", id=claim.item, exception=frames(error))
            await self._claims.release(claim, after=_DEFECT_SECONDS)

    async def _finish(self, claim: Claim) -> bool:
        """Store and publish the end. Return False if the response has not ended."""
        envelope = await self._envelopes.find(claim.item)
        if envelope is None:  # deleted
            return await self._claims.finish(claim)
        check_release(envelope)
        stream = await self._ended(envelope)
        if stream is None:
            return False
        state = stream.state()
        status = await self._responses.finish(claim, state)
        if status is None:
            return True  # another replica has taken it over
        await self._account(envelope, state)
        await self._publish_end(envelope, status)
        if await self._claims.finish(claim):
            self._metrics.response_stored(status)
        return True

    async def _account(self, envelope: Envelope, state: dict[str, Any]) -> None:
        """Charge the tokens, even if no client reads the answer. Count the stored bytes. A repeat changes nothing."""
        if state["usage"] is not None:
            total = state["usage"]["total_tokens"]
            await self._limits.charge(envelope.key, envelope.tokens_per_minute, envelope.id, total)
        kept, life = await self._responses.kept(envelope.id)
        await self._stored.change(envelope.key, envelope.tenant, envelope.id, kept, life)
        life = self._envelopes.result_ttl
        await self._stored.count_streams(envelope.key, envelope.tenant, envelope.request_ids, life)

    async def _ended(self, envelope: Envelope) -> ResponseStream | None:
        stream = await replay(self._streams, envelope)
        if stream is None:
            stream = ResponseStream(envelope)
            stream.fail("not_stored_in_time", "the response's stream expired before its end was stored")
            logger.warning("response expired before it was stored", id=envelope.id)
        return stream if stream.has_ended else None

    async def _publish_end(self, envelope: Envelope, status: str) -> None:
        assert isinstance(envelope.options, ResponseOptions)
        if not envelope.options.background:
            return
        at = int(time.time())
        await self._publish(f"response.{status}", envelope.id, key=envelope.key, tenant=envelope.tenant, at=at)
