"""`WorkerLeases`: all leases of a worker, whose queues may be on several servers."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from headrace_broker.keys import queue_lists, queue_of
from headrace_broker.queue.dead_letters import DeadLetter
from headrace_broker.queue.final_writes import FinalWrites
from headrace_broker.queue.leased_message import LeasedMessage
from headrace_broker.queue.leases import Leases
from headrace_broker.server.connections import CONNECTION_ERRORS, REDIS_ERRORS
from headrace_broker.streams.grant import Grant
from headrace_broker.usage.entry import UsageEntry
from headrace_wire.codes import DeadLetterReason

logger = logging.getLogger(__name__)

AWAY_SECONDS: Final = 5.0
"""How long a server other than the main one is left alone after it could not be reached. Each try blocks the worker."""


class WorkerLeases:
    """One `Leases` for each server that has one of the worker's queues; used by one thread only.

    A server that is away, or that hangs, delays the leases of another one by `OTHER_TIMEOUT` at most each time it is
    tried. After an error it is left alone for `AWAY_SECONDS`. Only the renewal of its leases is tried then, until they
    have expired, and settlements are pending. The methods are those of `Leases`. Those of one
    message find its server by the lease id, which is different for each queue.

    Args:
        main: the leases of the queues on the server of `HEADRACE_REDIS_URL`.
        others: by queue on another server: that server's leases.
    """

    def __init__(self, main: Leases, others: Mapping[str, Leases]) -> None:
        self._main: Final = main
        self._others: Final = dict(others)
        for leases in others.values():
            leases.away_seconds = AWAY_SECONDS
        self.all: Final = list(dict.fromkeys([main, *others.values()]))
        self.on_refused: Callable[[str], None] = lambda _reason: None
        self._reap_from: Final[dict[Leases, float]] = {}
        """When to reap again on a server that has refused it."""
        self.lease_seconds: Final = main.lease_seconds
        self.has_grace: Final = main.has_grace

    def of(self, queue: str) -> Leases:
        """Return the leases of the queue's server."""
        return self._others.get(queue, self._main)

    def is_on_main(self, queue: str) -> bool:
        """Return whether the queue is on the server of `HEADRACE_REDIS_URL`."""
        return self.of(queue) is self._main

    def away(self, queue: str) -> str | None:
        """Return why the queue's server, which is not the main one, is left alone now; None if it is not."""
        return self.of(queue).away

    def failed(self, queue: str, error: Exception) -> str:
        """Leave the queue's server alone if it could not be reached. Return the error with the server's address."""
        return self.of(queue).failed(error)

    @property
    def leaves_some(self) -> bool:
        """Whether messages stay in the queues because their stream servers are away."""
        return bool(self._main.away_homes())

    def report_to(
        self,
        *,
        on_lost: Callable[[Any], None],
        on_dead_letter: Callable[[DeadLetter], None],
        on_refused: Callable[[str], None],
        token_seconds: Callable[[], float | None],
        away_homes: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """Set the callbacks of all `Leases`."""
        self.on_refused = on_refused
        for leases in self.all:
            leases.on_lost, leases.on_dead_letter, leases.on_refused = on_lost, on_dead_letter, on_refused
            leases.token_seconds = token_seconds
            leases.away_homes = away_homes

    def __len__(self) -> int:
        return sum(map(len, self.all))

    def held(self) -> dict[str, Any]:
        return {lease_id: held for leases in self.all for lease_id, held in leases.held().items()}

    @property
    def reaped(self) -> set[str]:
        return set[str]().union(*(leases.reaped for leases in self.all))

    def is_alone(self) -> bool:
        """Return whether no other worker has served this worker's queues for some seconds."""
        return all(leases.is_alone for leases in self.all)

    def fetch_in_rounds(
        self,
        queues: Sequence[str],
        count: int,
        *,
        taken_from: int | None = None,
        split_from: int | None = None,
        on_error: Callable[[str, Exception], None],
    ) -> Iterator[list[LeasedMessage]]:
        """Fetch like `Leases.fetch_in_rounds`, at each priority step from these queues in their order.

        `on_error` is called with a queue and Redis's error. The other queues are then served.
        """
        served: int | None = None if len(queues) == 1 else 1
        left = dict.fromkeys(queues)
        while left:
            unserved = []
            for queue in list(left):
                if self.away(queue):
                    del left[queue]
                    continue
                rounds = self.of(queue).fetch_in_rounds(
                    queue_lists(queue), count, taken_from=taken_from, split_from=split_from, served=served
                )
                try:
                    while True:
                        messages = next(rounds)
                        count -= sum(message.choices for message in messages if not message.over_quota)
                        yield messages
                except StopIteration as end:
                    unserved.append(end.value)
                except REDIS_ERRORS as error:
                    self.failed(queue, error)
                    on_error(queue, error)
                    del left[queue]
                if count <= 0:
                    return
            if served is None or not any(unserved):
                return
            served = min(number for number in unserved if number)

    def tick(self) -> None:
        for leases in self.all:
            leases.tick()

    def reap(self) -> None:
        """Reap on every server. Only the errors of the main one are raised; the others are reported."""
        for leases in self.all[1:]:
            if not leases.away and time.monotonic() >= self._reap_from.get(leases, 0.0):
                try:
                    leases.reap()
                except REDIS_ERRORS as error:
                    self._reap_from[leases] = time.monotonic() + AWAY_SECONDS
                    problem = leases.failed(error)
                    logger.warning("expired leases not reaped: %s", problem)
                    self.on_refused(problem)
        self._main.reap()

    def sort(self, queues: Iterable[str]) -> None:
        """Sort new messages of these queues. Raises the last error of Redis after it has tried all.

        No error is raised if a server other than the main one cannot be reached.
        """
        failed: Exception | None = None
        for queue in queues:
            if self.away(queue):
                continue
            try:
                self.of(queue).sort(queue_lists(queue))
            except REDIS_ERRORS as error:
                self.failed(queue, error)
                if self.is_on_main(queue) or not isinstance(error, CONNECTION_ERRORS):
                    failed = error
        if failed is not None:
            raise failed

    def bind(self, message: LeasedMessage, request_id: object) -> str | None:
        return self.of(queue_of(message.list_name)).bind(message, request_id)

    def regrant(self, lease_id: str, at_least: int) -> Grant | None:
        return self._having(lease_id).regrant(lease_id, at_least)

    def remember_prefix(self, message: LeasedMessage, prefix: object) -> None:
        self.of(queue_of(message.list_name)).remember_prefix(prefix)

    def hold(self, lease_id: str, held: Any) -> None:
        self._having(lease_id).hold(lease_id, held)

    def let_go(self, lease_id: str) -> None:
        self._having(lease_id).let_go(lease_id)

    def cost(self, lease_id: str, tokens: int, entry: UsageEntry | None = None) -> None:
        self._having(lease_id).cost(lease_id, tokens, entry)

    def send(self, lease_id: str, writes: FinalWrites) -> None:
        self._having(lease_id).send(lease_id, writes)

    def ack(self, lease_id: str) -> None:
        self._having(lease_id).ack(lease_id)

    def requeue(
        self, lease_id: str, *, is_counted: bool = False, is_preempted: bool = False, choices: int | None = None
    ) -> None:
        leases = self._having(lease_id)
        leases.requeue(lease_id, is_counted=is_counted, is_preempted=is_preempted, choices=choices)

    def postpone(self, lease_id: str, seconds: float, *, keeps_place: bool = False) -> None:
        self._having(lease_id).postpone(lease_id, seconds, keeps_place=keeps_place)

    def dead_letter(self, lease_id: str, why: DeadLetterReason, detail: str = "") -> None:
        self._having(lease_id).dead_letter(lease_id, why, detail)

    def _having(self, lease_id: str) -> Leases:
        """Return the leases that have this message, or those of the main server if none has it."""
        return next((leases for leases in self.all if leases.has(lease_id)), self._main)
