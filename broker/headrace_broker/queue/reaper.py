"""`Reaper`: returns the messages of expired leases to the queues of which this process is the reaper."""

import logging
import math
import time
from collections.abc import Callable, Collection
from typing import Any, Final

import redis

from headrace_broker.keys import ELECTION_SECONDS, REAPER_SECONDS, RESTING_REAPER_SECONDS, queue_lists
from headrace_broker.queue.earlier_version import move_queue
from headrace_broker.scripts import script

logger = logging.getLogger(__name__)

_ELECT: Final = script("lease_elect")
_REAPED_AT_ONCE: Final = 500
_REAPER_ALONE: Final = 3
_REAPER: Final = 2
_NO_ROLE: Final = 0
_MOVING_SECONDS: Final = 0.1
_MOVED_SECONDS: Final = 10.0
"""Seconds until the next search for messages of an earlier version after a search found none. No script of an idle
worker takes longer."""
_REFUSED_SECONDS: Final = 2.0
"""The same after a search that Redis refused. Each refusal is reported again before the last report is cleared."""


class Reaper:
    """One process's roles in the queues that it serves: reaper, deputy or none. Redis's errors pass through.

    Args:
        owner: the owner of this process's leases.
        reap: runs the script `lease_reap`.
        report: called with the reason when messages cannot be returned.
    """

    def __init__(
        self,
        client: "redis.Redis",
        reap: Callable[..., Any],
        owner: str,
        report: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._client: Final = client
        self._elect: Final = _ELECT.bound(client)
        self._reap: Final = reap
        self._owner: Final = owner
        self._report: Final = report
        self._clock: Final = clock
        self._next_try: Final[dict[str, float]] = {}
        """By queue that this process serves: when it next tries to be the reaper or the deputy."""
        self._roles: Final[dict[str, int]] = {}
        """By queue: the role when it last tried."""
        self._alone_from: Final[dict[str, float]] = {}
        """By queue: since when this process has been its reaper without a deputy."""
        self._move_from: Final[dict[str, float]] = {}
        """By queue: when to look again for messages of an earlier version."""

    @property
    def served(self) -> Collection[str]:
        return self._next_try.keys()

    @property
    def reaped(self) -> set[str]:
        """The queues of which this process was the reaper when it last tried."""
        return {queue for queue, role in self._roles.items() if role >= _REAPER}

    @property
    def is_alone(self) -> bool:
        """Whether no other process has served its queues for some seconds.

        After a change of roles there may be no deputy for as long as the other processes do not look for one.
        """
        latest = self._clock() - 2 * ELECTION_SECONDS
        return all(self._alone_from.get(queue, math.inf) <= latest for queue in self._next_try)

    def forget_roles(self) -> None:
        """Be neither reaper nor deputy until the next try."""
        self._roles.clear()
        self._alone_from.clear()

    def serve(self, queue: str) -> None:
        """Be a candidate for the reaper of this queue from now on."""
        self._next_try[queue] = self._clock()

    def reap(self, queue: str) -> int:
        """Return messages of expired leases if this process is the reaper of the queue, and it is time for it."""
        if self._clock() < self._next_try[queue]:
            return 0
        role, is_empty = self._elect(self._owner, "", queue=queue, list=queue_lists(queue))
        self._roles[queue] = role
        if role == _REAPER_ALONE:
            self._alone_from.setdefault(queue, self._clock())
        else:
            self._alone_from.pop(queue, None)
        if role == _NO_ROLE:
            self._next_try[queue] = self._clock() + ELECTION_SECONDS
        elif is_empty:
            # kombu's timer is not exact, and this has to be before its second call
            self._next_try[queue] = self._clock() + RESTING_REAPER_SECONDS - REAPER_SECONDS * 3 / 4
        if role < _REAPER:
            return 0
        self._move_older(queue)
        return 0 if is_empty else self.reap_without_role(queue)

    def pause(self, queue: str) -> None:
        """Be at most the deputy of the queue, and reap nothing, so that its reaper knows that it is not alone."""
        if queue in self._next_try:
            self._elect(self._owner, "1", queue=queue, list=queue_lists(queue))

    def reap_without_role(self, queue: str) -> int:
        """Return messages of expired leases of the queue, even if this process is not its reaper."""
        reaped, problem, orphans = self._reap(_REAPED_AT_ONCE, queue=queue, list=queue_lists(queue))
        if reaped:
            logger.warning("returned %d message(s) of expired leases to queue %s", reaped, queue)
        if orphans:
            logger.warning("returned %d message(s) to queue %s that were neither leased nor waiting", orphans, queue)
        if problem:
            problem = problem.decode(errors="replace")
            logger.warning("messages of expired leases not returned to queue %s: %s", queue, problem)
            self._report(problem)
        return int(reaped)

    def _move_older(self, queue: str) -> None:
        """Move messages that workers of an earlier version have sorted, for some milliseconds."""
        until = time.monotonic() + _MOVING_SECONDS
        try:
            while self._clock() >= self._move_from.get(queue, -math.inf) and time.monotonic() < until:
                if not move_queue(self._client, queue):
                    self._move_from[queue] = self._clock() + _MOVED_SECONDS
        except redis.ResponseError as error:
            logger.warning("messages of an earlier version not moved to queue %s: %s", queue, error)
            self._move_from[queue] = self._clock() + _REFUSED_SECONDS
            self._report(str(error))
