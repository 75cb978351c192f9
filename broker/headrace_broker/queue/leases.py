"""`Leases`: fetches messages under a lease, renews the leases, and settles each message at the end.

A fetched message stays in Redis under a lease, which the holder renews. If the holder stops renewing, another worker
returns the message to the queue once the lease has expired by Redis's clock.

The scripts choose which message is fetched. First they sort new messages: they move each from the list to which its
producer pushed it to the sorted set of its tenant. Then tenants get shares of tokens by their weights
(`lua/ready_prelude.lua`). Nothing here knows Celery or kombu; see `transport.py`.
"""

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import redis

from headrace_broker.keys import (
    CREDIT_MILLISECONDS,
    ELECTION_SECONDS,
    credit_key,
    deputy_key,
    holder_wake_up_key,
    reaper_key,
    step_of,
)
from headrace_broker.queue.dead_letters import DeadLetter
from headrace_broker.queue.fair_share import FairShare
from headrace_broker.scripts import script
from headrace_broker.server.connections import CONNECTION_ERRORS, REDIS_ERRORS
from headrace_wire.codes import DeadLetterReason

logger = logging.getLogger(__name__)

_REAPED_AT_ONCE: Final = 500
_PURGED_AT_ONCE: Final = 500
_REFUSED_AT_ONCE: Final = 100
"""One fetch returns at most about this many messages over a quota, as the worker has to refuse each of them."""
PREFIXES_KEPT: Final = 64
"""With prefix affinity: of so many latest prefixes a process prefers messages."""
_LONGEST_PREFIX: Final = 32
"""In characters; the same as in `lua/tenant_prelude.lua`."""
_CREDIT_SECONDS: Final = 2.0
"""With a prefix grace: how often an idle worker tells the others how many free slots it has."""
_SORT_ROUNDS: Final = 30
"""The most scripts, of some milliseconds each, that one fetch runs to sort new messages."""
_SORT_ONLY_ROUNDS: Final = 3
"""The same for `Leases.sort`, which fetches nothing."""


_ELECT: Final = script("lease_elect")

SCRIPTS: Final = {
    name: script("key_checks", "tenant_prelude", "lease_prelude", "ready_prelude", f"lease_{name}")
    for name in (
        "fetch",
        "wake",
        "renew",
        "ack",
        "requeue",
        "postpone",
        "reap",
        "dead_letter",
        "bind",
        "purge",
        "take_delayed",
    )
}


@dataclass(frozen=True, slots=True)
class LeasedMessage:
    """A fetched message, byte for byte, with its lease."""

    lease_id: str
    list_name: str
    body: bytes = field(repr=False)
    deliveries: int  # 1 the first time
    over_quota: int = 0
    """The tenant's quota, if this message exceeds it and has to be refused; else 0."""
    bound_id: str | None = None
    """The request id that is bound to it; None if the scripts could not read one."""
    waited: float | None = field(default=None, compare=False)
    """Seconds by Redis's clock since the message was first sorted, or since it became due if it was postponed; None
    if a worker of an earlier version sorted it."""
    step: int = 0
    """Priority step at which it was taken: that of its list, or a lower one (0 is served first) if it had aged."""
    preemptions: int = 0
    """How often it was returned to the queue to make room for a message of a higher priority."""
    choices: int = 1
    """Number of choices, from its header or from a worker that has decoded it."""


class Leases:
    """One process's leases in one Redis database; used by one thread only.

    It outlives every connection: a settlement that fails is pending, and `tick` retries it. `on_lost` is called with
    the object that `hold` got for each lost lease. `on_dead_letter` is called with each message that this process makes
    a dead letter, and `on_refused` with the reason when messages cannot be taken or returned. `on_offered` is called
    when a fetch has left messages to the holders of their conversations, with the seconds after which any worker may
    take the first of them. This worker has to fetch again then, because the holder may be dead.
    """

    def __init__(
        self,
        client: "redis.Redis",
        *,
        lease_seconds: float,
        delivery_limit: int,
        fair_share: FairShare | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client: Final = client
        self._fair_share: Final = fair_share or FairShare()
        self._prefixes: Final[dict[str, None]] = {}
        """Prefixes of the latest messages, the newest last."""
        self.lease_seconds: Final = lease_seconds
        self.delivery_limit: Final = delivery_limit
        self.owner: Final = uuid.uuid4().hex
        self.on_lost: Callable[[Any], None] = lambda _held: None
        self.on_dead_letter: Callable[[DeadLetter], None] = lambda _letter: None
        self.on_refused: Callable[[str], None] = lambda _reason: None
        self.on_offered: Callable[[float], None] = lambda _seconds: None
        self._lists: Final[dict[str, Sequence[str]]] = {}
        """By queue that this process serves: its lists."""
        self.is_reaper = False
        """Whether this process returns the messages of expired leases, as the only one of a queue."""
        self._held: Final[dict[str, Any]] = {}
        self._pending: Final[dict[str, Callable[[], None]]] = {}
        self._tokens: Final[dict[str, int]] = {}
        self._clock: Final = clock
        self._tell_credit_from = clock()
        """When `tell_credit` writes again. Until then Redis knows that there are free slots."""
        self._renewed_at = clock()
        self._reap_from = clock()
        self._elect_from = clock()
        self._refused = False
        """A command failed, and Redis has accepted no write since."""
        self._run: Final = {name: each.bound(client) for name, each in SCRIPTS.items()}
        self._elect: Final = _ELECT.bound(client)

    def __len__(self) -> int:
        """Return how many messages are held."""
        return len(self._held)

    def serve(self, queue: str, lists: Sequence[str]) -> None:
        """Be a candidate for the reaper of this queue from now on, see `reap`."""
        self._lists[queue] = lists
        self._elect_from = self._clock()

    def fetch(
        self, lists: Sequence[str], count: int, *, taken_from: int | None = None, split_from: int | None = None
    ) -> list[LeasedMessage]:
        """Lease messages with up to `count` choices in all, from the first lists that have messages.

        All new messages are sorted first, so that many messages of one tenant cannot hide those of another. Messages
        over a tenant's quota are returned in addition to `count`. If the reply is lost, the messages return to the
        queue when the lease expires. Messages that a key of the wrong type blocks stay in the queue. If no other
        message can be taken, ResponseError is raised. Redis's other errors pass through.

        Args:
            taken_from: only messages that arrived in the first `taken_from` lists are taken. None: all lists.
            split_from: the last message may have more choices than `count` has left, if it arrived in one of the first
                `split_from` lists. Other messages that do not fit stay in the queue, and smaller ones of other tenants
                are taken. None: all lists.
        """
        rounds = self.fetch_in_rounds(lists, count, taken_from=taken_from, split_from=split_from)
        return [message for messages in rounds for message in messages]

    def fetch_in_rounds(
        self, lists: Sequence[str], count: int, *, taken_from: int | None = None, split_from: int | None = None
    ) -> Iterator[list[LeasedMessage]]:
        """Fetch like `fetch`, one script at each step, so that an event loop can do other work between the scripts."""
        self._renew_if_late()
        policy = self._fair_share.packed(self._prefixes)
        unsorted, rounds_left, num_messages, problem = 1, _SORT_ROUNDS, 0, ""
        while unsorted:
            is_to_sort = rounds_left > 0 and num_messages < _REFUSED_AT_ONCE and not problem
            rounds_left -= 1
            messages: list[LeasedMessage] = []
            mode = "sort" if is_to_sort else ""
            unsorted, found = self._fetch_once(lists, count, policy, mode, messages, taken_from, split_from)
            problem = problem or found
            num_messages += len(messages)
            for message in messages:
                self._pending.pop(message.lease_id, None)  # a settlement of an earlier lease
                self._drop_lost(message.lease_id)
            yield messages
        if problem and not num_messages:
            raise redis.ResponseError(problem)
        if problem:
            self.on_refused(problem)

    @property
    def has_grace(self) -> bool:
        """Whether messages wait for the holder of their conversation. Then this worker waits for its own token, too."""
        return self._fair_share.has_grace

    def tell_credit(self, queues: Iterable[str], slots: int) -> None:
        """With a prefix grace, let messages of this worker's conversations wait for it, as it has free slots.

        To be called whenever the worker begins to wait: it writes only every two seconds, or after a fetch that has
        filled all slots. Does nothing if Redis refuses to write: then the messages do not wait. Other errors of Redis
        pass through.
        """
        if self.has_grace and self._clock() >= self._tell_credit_from:
            self._tell_credit_from = self._clock() + _CREDIT_SECONDS
            with suppress(redis.ResponseError):
                for queue in queues:
                    self._client.set(credit_key(queue, self.owner), slots, px=CREDIT_MILLISECONDS)

    def withdraw_credit(self, queue: str) -> None:
        """Let no message wait for this worker, as it cannot fetch. Redis's errors pass through."""
        self._tell_credit_from = self._clock()
        self._client.delete(credit_key(queue, self.owner))

    def wake_up_again(self, queue: str) -> None:
        """Create this worker's own wake-up token again, because it could not fetch yet. Redis's errors pass through."""
        key = holder_wake_up_key(queue, self.owner)
        with self._client.pipeline(transaction=True) as commands:
            commands.lpush(key, "1")
            commands.pexpire(key, CREDIT_MILLISECONDS)
            commands.execute()

    def wake(self, lists: Sequence[str]) -> None:
        """Let the messages that wait in these lists wake another worker. Redis's errors pass through.

        A worker that a message or the wake-up token woke calls it if it cannot fetch: no other worker was woken.
        """
        self._run["wake"](list=lists)

    def bind(self, message: LeasedMessage, request_id: object) -> bool:
        """Bind the request id to the message. Return False if it is bound to another one. Redis's errors pass through.

        The scripts bind the id when they sort a message, if they can read it. This call is for the other messages, and
        for those that a worker of an earlier version sorted. `request_id` is the id in the decoded message, and
        replaces what the scripts have read.
        """
        if not isinstance(request_id, str) or request_id == message.bound_id:
            return True
        return bool(self._run["bind"](self.owner, message.lease_id, request_id))

    def sort(self, lists: Sequence[str]) -> None:
        """Sort new messages while there is no room to take them. Redis's errors pass through.

        If its producer gives no enqueue time, a message's age counts from the time at which it is first sorted.
        """
        policy = self._fair_share.packed(self._prefixes)
        for _ in range(_SORT_ONLY_ROUNDS):
            unsorted, problem = self._fetch_once(lists, 0, policy, "sort only", [])
            if problem:
                raise redis.ResponseError(problem)
            if not unsorted:
                return

    def _fetch_once(
        self,
        lists: Sequence[str],
        count: int,
        policy: bytes,
        mode: str,
        messages: list[LeasedMessage],
        taken_from: int | None = None,
        split_from: int | None = None,
    ) -> tuple[int, str]:
        """Run one script and append the messages that it leases to `messages`.

        Returns how many messages are left unsorted, and the problem that blocks messages, or ''.
        """
        limits = ("" if limit is None else limit for limit in (taken_from, split_from))
        leased, dead, unsorted, problem, retry_after = self._run["fetch"](
            count, self.owner, self.lease_seconds, self.delivery_limit, policy, mode, *limits, list=lists
        )
        if retry_after:
            self.on_offered(int(retry_after) / 1e6)
        for list_name, body, deliveries, reason, bound_id in dead:
            letter = DeadLetter(reason.decode(), list_name.decode(), deliveries, body, bound_id=_id_of(bound_id))
            self._report_dead(letter)
        messages += [_leased_message(fields) for fields in leased]
        if not unsorted and sum(message.choices for message in messages if not message.over_quota) >= count:
            self._tell_credit_from = self._clock()  # the script has withdrawn it
        return unsorted, problem.decode(errors="replace")

    def take_delayed(self, lists: Sequence[str], count: int) -> list[LeasedMessage]:
        """Lease up to `count` delayed messages of one queue. Redis's errors pass through."""
        taken = self._run["take_delayed"](count, self.owner, self.lease_seconds, list=lists)
        return [LeasedMessage(lease_id.decode(), name.decode(), body, 0) for lease_id, name, body in taken]

    def purge(self, lists: Sequence[str]) -> int:
        """Delete the waiting messages of one queue that are sorted; return how many. Redis's errors pass through."""
        purged = 0
        while deleted := self._run["purge"](_PURGED_AT_ONCE, list=lists):
            purged += deleted
        return purged

    def hold(self, lease_id: str, held: Any) -> None:
        """Renew this lease from now on. `on_lost` is called with `held` if the lease is lost."""
        self._held[lease_id] = held

    def remember_prefix(self, prefix: object) -> None:
        """Record the `prefix` header of a message. With prefix affinity, later fetches prefer messages that have it."""
        if not isinstance(prefix, str) or not prefix.isascii() or len(prefix) > _LONGEST_PREFIX:
            return  # the scripts ignore such a prefix, and it may be megabytes or no text at all
        if self._fair_share.prefix_affinity:
            self._prefixes.pop(prefix, None)
            self._prefixes[prefix] = None
            while len(self._prefixes) > PREFIXES_KEPT:
                del self._prefixes[next(iter(self._prefixes))]

    def held(self) -> dict[str, Any]:
        """Return the held objects by lease id, in the order of arrival."""
        return dict(self._held)

    def let_go(self, lease_id: str) -> None:
        """Stop renewing this lease. When it expires, the message returns to the queue. The delivery stays counted."""
        self._held.pop(lease_id, None)
        self._tokens.pop(lease_id, None)

    def cost(self, lease_id: str, tokens: int) -> None:
        """Set how many tokens of prompt and output the message cost. `ack` charges them to its tenant."""
        if lease_id in self._held:
            self._tokens[lease_id] = tokens

    def ack(self, lease_id: str) -> None:
        """Acknowledge the message: it is done. If Redis fails, `tick` retries."""
        self._settle_by("ack", lease_id, self._tokens.get(lease_id, ""))

    def requeue(
        self, lease_id: str, *, is_counted: bool = False, is_preempted: bool = False, choices: int | None = None
    ) -> None:
        """Return the message to its place in the queue. If Redis fails, `tick` retries.

        The delivery counts toward the limit only with `is_counted`. To keep the order of several messages, requeue the
        last one first. With `is_preempted`, the message makes room for one of a higher priority, and its `preemptions`
        grow by one. `choices`, if given, is recorded as its number of choices for the next fetch.
        """
        self._settle_by("requeue", lease_id, int(is_counted), int(is_preempted), choices or "")

    def postpone(self, lease_id: str, seconds: float, *, keeps_place: bool = False) -> None:
        """Delay the message by `seconds`. The reaper of any worker then returns it to the queue, at most a second late.

        The delivery does not count. The message begins to age when it is due. With `keeps_place`, it keeps its place
        and its age, as if it had never been taken. If Redis fails, `tick` retries.
        """
        self._settle_by("postpone", lease_id, seconds, int(keeps_place))

    def dead_letter(self, lease_id: str, why: DeadLetterReason, detail: str = "") -> None:
        """Make the message a dead letter with this reason and detail. If Redis fails, `tick` retries."""
        reason = why.saying(detail) if detail else str(why)

        def dead_letter() -> None:
            moved = self._run["dead_letter"](self.owner, lease_id, reason)
            self._expect_owned(bool(moved), "dead_letter")
            if moved:
                list_name, body, deliveries, bound_id = moved
                letter = DeadLetter(reason, list_name.decode(), deliveries, body, bound_id=_id_of(bound_id))
                self._report_dead(letter)

        self._settle(lease_id, dead_letter)

    def tick(self) -> None:
        """Renew the held leases and retry the pending settlements. Call it after every third of `lease_seconds`."""
        try:
            self._renew_held()
            self._retry_pending()
        except REDIS_ERRORS as error:
            self._refused = True
            logger.warning("leases not renewed: %s; %d held, %d pending", error, len(self._held), len(self._pending))

    def _retry_pending(self) -> None:
        """Retry each pending settlement. Raises only if the server cannot be reached."""
        refusal = None
        for lease_id, settle in list(self._pending.items()):
            try:
                settle()
            except CONNECTION_ERRORS:
                raise
            except redis.RedisError as error:  # one refused settlement must not block the others
                refusal = error
            else:
                self._pending.pop(lease_id, None)
        if refusal is not None:
            logger.warning("%d settlement(s) still pending, last error: %s", len(self._pending), refusal)

    def reap(self) -> int:
        """Return messages of expired leases to their queues; return how many. Redis's errors pass through.

        One call returns 500 messages at most. It also checks a few stored messages, and returns those that are neither
        leased nor waiting. If messages wait in the queues of `serve`, it wakes a worker, because the one that they woke
        may have died.

        One worker a queue is the reaper, and the calls of the others do nothing. If the reaper does not call this for
        `keys.REAPER_MILLISECONDS`, its deputy is the reaper. Both renew their rights by each call. The others look only
        once in `keys.ELECTION_SECONDS` whether one of the two is missing. A process that serves no queue always reaps.
        """
        try:
            if self._refused:
                self._renew_held()  # the outage is over only when Redis accepts this
                self.pause_reaping()
            lists = [name for lists in self._lists.values() for name in lists]
            self.is_reaper = False
            if self._clock() < self._reap_from:  # another worker may be able to reap
                self.wake(lists)
                return 0
            if self._lists and not self._is_elected():
                return 0
            self.is_reaper = True
            self._renew_if_late()
            reaped, problem, orphans = self._run["reap"](_REAPED_AT_ONCE, list=lists)
        except REDIS_ERRORS:
            self._refused = True
            raise
        if reaped:
            logger.warning("returned %d message(s) of expired leases to their queues", reaped)
        if orphans:
            logger.warning("returned %d message(s) to their queues that were neither leased nor waiting", orphans)
        if problem:
            logger.warning(
                "messages of expired leases not returned to their queues: %s", problem.decode(errors="replace")
            )
            self.on_refused(problem.decode(errors="replace"))
        return int(reaped)

    def _is_elected(self) -> bool:
        """Return whether this process is the reaper of one of its queues."""
        if self._clock() < self._elect_from:
            return False
        reaped, deputised = self._elect(
            self.owner, reaper=[*map(reaper_key, self._lists)], deputy=[*map(deputy_key, self._lists)]
        )
        if not (reaped or deputised):
            self._elect_from = self._clock() + ELECTION_SECONDS
        return bool(reaped)

    def pause_reaping(self) -> None:
        """Reap nothing for the time of a lease: after an outage, the other workers need time to renew theirs."""
        self._refused = False
        self._reap_from = self._clock() + self.lease_seconds

    def _settle_by(self, action: str, lease_id: str, *args: str | float) -> None:
        """Settle the message by the script of this name."""
        self._settle(lease_id, lambda: self._expect_owned(self._run[action](self.owner, lease_id, *args), action))

    def _settle(self, lease_id: str, settle: Callable[[], None]) -> None:
        self.let_go(lease_id)
        try:
            settle()
        except REDIS_ERRORS as error:
            self._pending[lease_id] = settle
            logger.warning("lease %s not settled yet: %s; %d pending", lease_id, error, len(self._pending))

    def _expect_owned(self, owned: int, action: str) -> None:
        if not owned:
            logger.warning("%s of a lost lease: another worker has the message", action)

    def _renew_if_late(self) -> None:
        # If this process was stopped or blocked for long, find the lost leases before it takes or reaps anything.
        if self._clock() - self._renewed_at > self.lease_seconds / 2:
            self._renew_held()

    def _renew_held(self) -> None:
        if self._held or self._refused:  # the script writes even if there is nothing to renew
            for lease_id in self._run["renew"](self.owner, self.lease_seconds, *self._held):
                self._drop_lost(lease_id.decode())
        self._renewed_at = self._clock()

    def _drop_lost(self, lease_id: str) -> None:
        if lease_id in self._held:
            logger.warning("lease %s lost: another worker may have the message", lease_id)
            held = self._held[lease_id]
            self.let_go(lease_id)
            self.on_lost(held)

    def _report_dead(self, letter: DeadLetter) -> None:
        about = (letter.queue, letter.deliveries, letter.reason, letter.described)
        logger.error("dead letter in %s after %d deliveries: %s; %s", *about)
        self.on_dead_letter(letter)


def _id_of(bound_id: bytes) -> str | None:
    return bound_id.decode(errors="replace") or None


def _leased_message(fields: Sequence[Any]) -> LeasedMessage:
    lease_id, name, body, deliveries, quota, bound_id, waited, taken_from, preemptions, choices = fields
    since = int(waited) / 1e6 if waited else None
    step = step_of(taken_from.decode())
    name, bound_id = name.decode(), _id_of(bound_id)
    return LeasedMessage(lease_id.decode(), name, body, deliveries, quota, bound_id, since, step, preemptions, choices)
