"""`SimulatedWorker`: serves the request of a schedule with the product's leases and stream writer, and crashes."""

from collections import Counter
from collections.abc import Callable, Generator, Mapping
from functools import partial
from random import Random
from typing import Any, Final, TypeAlias

import redis

from fleet.protocol_servers import LEASE_SECONDS, REQUEST, QueueServer, StreamServer
from fleet.virtual_time import Actor, Network, Server, VirtualTime
from headrace_broker.queue.leased_message import LeasedMessage
from headrace_broker.queue.leases import Leases
from headrace_broker.server.stream_table import StreamTable, home_of
from headrace_broker.streams.events import ChunkEvent
from headrace_broker.streams.grant import Grant
from headrace_broker.streams.writer import StreamClaim, StreamWrite, StreamWriter, WriteOutcome
from service.broker.tenant_messages import LISTS

NUM_TOKENS: Final = 20
_REPLY_SECONDS: Final = 5.0
_STEP_SECONDS: Final = (0.5, 4.0)
_MEAN_LIFE_SECONDS: Final = 60.0
_FROZEN, _FROZEN_SECONDS = 0.15, (12.0, 35.0)
"""The share of steps before which a process stops for so long, and does not renew its lease."""
_FINISH_TRIES: Final = 3

_Steps: TypeAlias = Generator[float, None, Any]


class _CrashError(Exception):
    """The process was killed."""


class _LeaseLostError(Exception):
    """Another worker may have the message."""


class SimulatedWorker:
    """One machine whose worker process is started again after each crash.

    Args:
        streams: the stream servers by name.
        writers: the same of each.
        uses_grants: whether claims have the lease's number.
        reads_table: whether the worker writes to the home by the table of stream servers that it read at its start, and
            not to the home that is recorded with the message.
    """

    def __init__(
        self,
        name: str,
        time: VirtualTime,
        random: Random,
        network: Network,
        queue: QueueServer,
        streams: Mapping[str, StreamServer],
        writers: Mapping[str, StreamWriter],
        make_leases: Callable[[], Leases],
        *,
        uses_grants: bool,
        reads_table: bool = False,
    ) -> None:
        self._name, self._time, self._random, self._network = name, time, random, network
        self._queue, self._streams, self._writers, self._make_leases = queue, streams, writers, make_leases
        self._uses_grants, self._reads_table = uses_grants, reads_table
        self.results: list[int] = []
        """Number of tokens of each stored result. Several workers may store it."""
        self.counts: Counter[str] = Counter()

    def run(self) -> Actor:
        """Run processes one after the other until the request is done."""
        while not self._queue.is_done:
            try:
                yield from self._live(_Process(self._make_leases(), self._dies_at(), self._queue.read_table()))
            except _CrashError:
                self.counts["crashes"] += 1
            yield self._random.uniform(0.5, 5.0)

    def _dies_at(self) -> float:
        return (
            float("inf") if self._network.is_calm else self._time.now + self._random.expovariate(1 / _MEAN_LIFE_SECONDS)
        )

    def _live(self, process: "_Process") -> _Steps:
        while not self._queue.is_done:
            yield 0.2
            try:
                messages = yield from self._call(process, self._queue, partial(process.leases.fetch, LISTS, 1))
                for message in messages:
                    yield from self._serve(process, message)
            except redis.RedisError:
                yield 0.5
            except _LeaseLostError:
                pass
            yield 0.5
            process.check_alive(self._time.now)

    def _serve(self, process: "_Process", message: LeasedMessage) -> _Steps:
        process.leases.hold(message.lease_id, message)
        process.served = message
        self._time.start(self._renew(process, message))
        try:
            claimed = yield from self._claim(process, message)
            if claimed is None:
                return
            claim, grant = claimed
            if claim.ended is None:
                tokens = sum(len(entry.token_ids) for entry in claim.entries if isinstance(entry, ChunkEvent))
                is_complete = yield from self._generate(process, message, grant, claim.attempt, tokens)
                if not is_complete:
                    return
            yield from self._finish(process, message, claim)
        finally:
            process.served = None

    def _renew(self, process: "_Process", message: LeasedMessage) -> Actor:
        """Renew the lease while the message is served."""

        def tick() -> bool:
            process.leases.tick()
            return any(each is message for each in process.lost)

        while process.served is message and self._time.now < process.dies_at:
            yield max(LEASE_SECONDS / 3, process.frozen_until - self._time.now)
            self._time.start(self._note_lost(process, message, self._network.call(self._queue, tick)))

    def _note_lost(self, process: "_Process", message: LeasedMessage, call: Any) -> Actor:
        while not (call.is_answered or call.is_refused) and process.served is message:
            yield 0.5
        if call.reply and process.served is message:
            process.is_lost = True

    def _claim(self, process: "_Process", message: LeasedMessage) -> _Steps:
        """Claim the stream as `StreamClaims` does, but repeat a claim whose reply was lost."""
        grant: Grant | None = message.grant if self._uses_grants else None
        home = self._home_of(process, message)
        while True:
            claim_once = partial(self._claim_once, home, grant)
            try:
                claim: StreamClaim = yield from self._call(process, self._streams[home], claim_once)
            except redis.TimeoutError:
                continue
            except redis.ConnectionError:
                postpone = partial(self._queue.postpone, process.leases, message.lease_id, 1.0)
                yield from self._call(process, self._queue, postpone)
                return None
            if not claim.is_stale:
                return claim, grant if self._uses_grants else message.grant
            regrant = partial(process.leases.regrant, message.lease_id, claim.attempt)
            grant = yield from self._until_answered(process, self._queue, regrant)
            if grant is None:
                process.leases.let_go(message.lease_id)
                return None

    def _home_of(self, process: "_Process", message: LeasedMessage) -> str:
        if self._reads_table:
            return home_of(process.table.open_servers(self._queue.clock() * 1000), REQUEST)
        return message.home

    def _claim_once(self, home: str, grant: Grant | None) -> StreamClaim:
        claim = self._writers[home].claim(REQUEST, self._name, content="c", grant=grant)
        self.counts["stale claims refused"] += claim.is_stale
        return claim

    def _generate(
        self, process: "_Process", message: LeasedMessage, grant: Grant | None, attempt: int, tokens: int
    ) -> _Steps:
        """Write chunks and the end. Return False if the stream refuses an entry."""
        home = self._home_of(process, message)
        while True:
            first, tokens = tokens + 1, min(tokens + self._random.randrange(1, 4), NUM_TOKENS)
            is_end = first > NUM_TOKENS
            ids = list(range(first, tokens + 1))
            write = (
                StreamWrite.end(REQUEST, attempt, tokens, finish_reason="stop")
                if is_end
                else StreamWrite.chunk(REQUEST, attempt, tokens, index=0, token_ids=ids, text="x")
            )
            publish = partial(self._publish, process, message, home, grant, write)
            refused = yield from self._until_answered(process, self._streams[home], publish)
            if refused:
                requeue = partial(process.leases.requeue, message.lease_id, is_counted=True)
                yield from self._call(process, self._queue, requeue)
                return False
            if is_end:
                return True
            yield self._step_seconds(process)

    def _step_seconds(self, process: "_Process") -> float:
        if self._network.is_calm or self._random.random() >= _FROZEN:
            return self._random.uniform(*_STEP_SECONDS)
        self.counts["freezes"] += 1
        seconds = self._random.uniform(*_FROZEN_SECONDS)
        process.frozen_until = self._time.now + seconds
        return seconds

    def _publish(
        self, process: "_Process", message: LeasedMessage, home: str, grant: Grant | None, write: StreamWrite
    ) -> dict[Any, WriteOutcome]:
        outcomes = self._writers[home].publish([write])
        if outcomes and self._queue.has_lease(process.leases, message.lease_id, grant):
            self.counts["owners fenced"] += 1
        return outcomes

    def _finish(self, process: "_Process", message: LeasedMessage, claim: StreamClaim) -> _Steps:
        """Store the result, then acknowledge the message."""

        def finish() -> None:
            self.results.append(NUM_TOKENS if claim.ended is None else claim.ended.tokens)
            process.leases.ack(message.lease_id)

        for _ in range(_FINISH_TRIES):
            try:
                yield from self._call(process, self._queue, finish)
                return
            except redis.RedisError:
                pass

    def _until_answered(self, process: "_Process", server: Server, run: Callable[[], Any]) -> _Steps:
        """Send the same call until it is answered."""
        while True:
            try:
                return (yield from self._call(process, server, run))
            except redis.RedisError:
                yield 0.1

    def _call(self, process: "_Process", server: Server, run: Callable[[], Any]) -> _Steps:
        """Send a call and return its reply. Raises the errors of a client, or the end of the process or the lease."""
        call, until = self._network.call(server, run), self._time.now + _REPLY_SECONDS
        while not (call.is_answered or call.is_refused) and self._time.now < until:
            yield 0.1
        process.check_alive(self._time.now)
        if process.served is not None and process.is_lost:
            raise _LeaseLostError
        if call.is_refused:
            raise redis.ConnectionError("connection refused")
        if not call.is_answered:
            raise redis.TimeoutError("no reply")
        return call.reply


class _Process:
    """A worker process: its leases, the table of stream servers at its start, and the message that it serves."""

    def __init__(self, leases: Leases, dies_at: float, table: StreamTable) -> None:
        self.leases, self.dies_at, self.table = leases, dies_at, table
        self.frozen_until = 0.0
        self._served: LeasedMessage | None = None
        self.is_lost = False
        """Whether the process knows that it has lost the lease."""
        self.lost: list[LeasedMessage] = []
        leases.on_lost = self.lost.append

    @property
    def served(self) -> LeasedMessage | None:
        return self._served

    @served.setter
    def served(self, message: LeasedMessage | None) -> None:
        self._served, self.is_lost = message, False

    def check_alive(self, now: float) -> None:
        if now >= self.dies_at:
            raise _CrashError
