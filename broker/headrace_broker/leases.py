"""The messages that this process holds, and the right to hold them.

A fetched message stays in Redis under a lease, which the holder renews. If the holder falls silent, any other worker
puts the message back when the lease has run out by Redis's clock. Which message is fetched is the scripts' choice: what
has arrived is sorted by tenant, and tenants get equal shares of tokens, by weight; see `lua/ready_prelude.lua`. Nothing
here knows Celery or kombu; see `transport.py`.
"""

import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import redis

from headrace_broker.connections import CONNECTION_ERRORS, REDIS_ERRORS
from headrace_broker.dead_letters import DeadLetter
from headrace_broker.fair_share import FairShare
from headrace_broker.keys import level_of
from headrace_broker.reasons import DeadLetterReason
from headrace_broker.scripts import LuaScript, script

logger = logging.getLogger(__name__)

_REAPED_AT_ONCE: Final = 500
_PURGED_AT_ONCE: Final = 500
_REFUSED_AT_ONCE: Final = 100
"""Messages over a quota that one fetch hands out, about; each is some work for the worker."""
_PREFIXES_KEPT: Final = 64
_LONGEST_PREFIX: Final = 32
"""Characters; as in `lua/tenant_prelude.lua`."""
_SORT_ROUNDS: Final = 30
"""Scripts, of some milliseconds each, that one fetch may take to sort what has arrived."""
_SORT_ROUNDS_BESIDE: Final = 3
"""The same, where nothing is to be fetched."""


def _lease_script(name: str) -> LuaScript:
    return script("key_checks", "tenant_prelude", "lease_prelude", "ready_prelude", f"lease_{name}")


_FETCH: Final = _lease_script("fetch")
_RENEW: Final = _lease_script("renew")
_ACK: Final = _lease_script("ack")
_RELEASE: Final = _lease_script("release")
_POSTPONE: Final = _lease_script("postpone")
_REAP: Final = _lease_script("reap")
_BURY: Final = _lease_script("bury")
_BIND: Final = _lease_script("bind")
_PURGE: Final = _lease_script("purge")
_TAKE_DELAYED: Final = _lease_script("take_delayed")


@dataclass(frozen=True, slots=True)
class LeasedMessage:
    """A message as it lay in the queue."""

    lease_id: str
    list_name: str
    body: bytes = field(repr=False)
    deliveries: int  # 1 the first time
    over_quota: int = 0
    """The quota, where its tenant has too many messages in the queue and this one is only to be refused; else 0."""
    bound_id: str | None = None
    """The request id that is bound to it, as far as the scripts could read one."""
    waited: float | None = field(default=None, compare=False)
    """Seconds by Redis's clock since the message was first sorted, or since its time where it was postponed; None
    where a worker of an earlier version has sorted it."""
    level: int = 0
    """Priority step at which it counted when it was taken: its list's, or a better one where it had aged."""
    preemptions: int = 0
    """How often it was handed back to make room for a message of a better level."""


class Leases:
    """One process's leases in one Redis database; used by one thread only.

    It outlives every connection: what could not be told to Redis is owed, and told later. `on_lost` is called with the
    held object of each lease that another worker has taken; `on_dead_letter` with each message that ended up dead here;
    `on_refused` with the reason when messages cannot be taken or put back.
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
        """Of the latest messages, the newest last."""
        self.lease_seconds: Final = lease_seconds
        self.delivery_limit: Final = delivery_limit
        self.owner: Final = uuid.uuid4().hex
        self.on_lost: Callable[[Any], None] = lambda _held: None
        self.on_dead_letter: Callable[[DeadLetter], None] = lambda _letter: None
        self.on_refused: Callable[[str], None] = lambda _reason: None
        self._held: Final[dict[str, Any]] = {}
        self._owed: Final[dict[str, Callable[[], None]]] = {}
        self._tokens: Final[dict[str, int]] = {}
        self._clock: Final = clock
        self._renewed_at = clock()
        self._reap_from = clock()
        self._refused = False
        """Redis failed us, and has not taken a write since."""
        self._fetch: Final = client.register_script(_FETCH.text)
        self._renew: Final = client.register_script(_RENEW.text)
        self._ack: Final = client.register_script(_ACK.text)
        self._release: Final = client.register_script(_RELEASE.text)
        self._postpone: Final = client.register_script(_POSTPONE.text)
        self._reap: Final = client.register_script(_REAP.text)
        self._bury: Final = client.register_script(_BURY.text)
        self._bind: Final = client.register_script(_BIND.text)
        self._purge: Final = client.register_script(_PURGE.text)
        self._take_delayed: Final = client.register_script(_TAKE_DELAYED.text)

    def __len__(self) -> int:
        """How many messages are held."""
        return len(self._held)

    def fetch(self, lists: Sequence[str], count: int, *, taken_from: int | None = None) -> list[LeasedMessage]:
        """Leases up to `count` messages from the first lists that have any. Redis's errors pass through.

        All that has arrived is sorted first, so that a tenant's message is seen behind any number of another's. What is
        over a tenant's quota comes beside the others and needs no room. If the reply is lost, the messages come back
        when the lease has run out. Where a key of the wrong type keeps some messages from being taken, the others are;
        ResponseError is raised where there is none.

        With `taken_from` only messages are taken that came by the first so many of the lists.
        """
        rounds = self.fetch_in_rounds(lists, count, taken_from=taken_from)
        return [message for messages in rounds for message in messages]

    def fetch_in_rounds(
        self, lists: Sequence[str], count: int, *, taken_from: int | None = None
    ) -> Iterator[list[LeasedMessage]]:
        """As `fetch`, by one script after the other, between which an event loop may see to other things."""
        self._renew_if_late()
        policy = self._fair_share.packed(self._prefixes)
        unsorted, rounds_left, num_messages, problem = 1, _SORT_ROUNDS, 0, ""
        while unsorted:
            is_to_sort = rounds_left > 0 and num_messages < _REFUSED_AT_ONCE and not problem
            rounds_left -= 1
            messages: list[LeasedMessage] = []
            unsorted, found = self._fetch_once(lists, count, policy, "sort" if is_to_sort else "", messages, taken_from)
            problem = problem or found
            num_messages += len(messages)
            for message in messages:
                self._owed.pop(message.lease_id, None)  # pending for the lease before this one
                self._drop_lost(message.lease_id)
            yield messages
        if problem and not num_messages:
            raise redis.ResponseError(problem)
        if problem:
            self.on_refused(problem)

    def bind(self, message: LeasedMessage, request_id: object) -> bool:
        """Makes the request id the message's own. False where it is another message's. Redis's errors pass through.

        The scripts bind what they can read when they sort; this is for the others, and those that were sorted by a
        worker of an earlier version. What the message itself says counts.
        """
        if not isinstance(request_id, str) or request_id == message.bound_id:
            return True
        return bool(self._bind(args=[self.owner, message.lease_id, request_id]))

    def sort(self, lists: Sequence[str]) -> None:
        """Sorts what has arrived, while there is no room to take it. Redis's errors pass through.

        The moment at which a message is first sorted is all that is known of its age where its producer does not say.
        """
        policy = self._fair_share.packed(self._prefixes)
        for _ in range(_SORT_ROUNDS_BESIDE):
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
    ) -> tuple[int, str]:
        """Adds what one script has leased. Returns how many are unsorted, and what keeps messages from being taken."""
        leased, dead, unsorted, problem = self._fetch(
            keys=_FETCH.keys(list=lists),
            args=[
                *(count, self.owner, self.lease_seconds, self.delivery_limit, policy, mode),
                "" if taken_from is None else taken_from,
            ],
        )
        for list_name, body, deliveries, reason, bound_id in dead:
            letter = DeadLetter(reason.decode(), list_name.decode(), deliveries, body, bound_id=_id_of(bound_id))
            self._report_dead(letter)
        messages += [_leased_message(*fields) for fields in leased]
        return unsorted, problem.decode(errors="replace")

    def take_delayed(self, lists: Sequence[str], count: int) -> list[LeasedMessage]:
        """Leases up to `count` messages of one queue whose time has not come. Redis's errors pass through."""
        taken = self._take_delayed(keys=_TAKE_DELAYED.keys(list=lists), args=[count, self.owner, self.lease_seconds])
        return [LeasedMessage(lease_id.decode(), name.decode(), body, 0) for lease_id, name, body in taken]

    def purge(self, lists: Sequence[str]) -> int:
        """Deletes the sorted messages of one queue that nobody holds. Redis's errors pass through."""
        purged = 0
        while deleted := self._purge(keys=_PURGE.keys(list=lists), args=[_PURGED_AT_ONCE]):
            purged += deleted
        return purged

    def hold(self, lease_id: str, held: Any) -> None:
        """Renews this lease from now on; `held` is what `on_lost` gets."""
        self._held[lease_id] = held

    def had_prefix(self, prefix: object) -> None:
        """A message with this `prefix` header has come: others of the same are welcome from now on."""
        if not isinstance(prefix, str) or not prefix.isascii() or len(prefix) > _LONGEST_PREFIX:
            return  # the scripts sort no message by such a prefix, and it may be megabytes or no text at all
        if self._fair_share.prefix_affinity:
            self._prefixes.pop(prefix, None)
            self._prefixes[prefix] = None
            while len(self._prefixes) > _PREFIXES_KEPT:
                del self._prefixes[next(iter(self._prefixes))]

    def held(self) -> dict[str, Any]:
        """What is held now, by lease id, in the order of arrival."""
        return dict(self._held)

    def let_go(self, lease_id: str) -> None:
        """Renews this lease no more: the message comes back when it has run out, as one more delivery."""
        self._held.pop(lease_id, None)
        self._tokens.pop(lease_id, None)

    def cost(self, lease_id: str, tokens: int) -> None:
        """So many tokens has the message cost its tenant, prompt and output; it pays when the message is done."""
        if lease_id in self._held:
            self._tokens[lease_id] = tokens

    def ack(self, lease_id: str) -> None:
        """The message is done. Owed if Redis cannot be reached."""
        args = [self.owner, lease_id, self._tokens.get(lease_id, "")]
        self._settle(lease_id, lambda: self._expect_owned(self._ack(args=args), "ack"))

    def release(self, lease_id: str, *, strike: bool = False, is_preempted: bool = False) -> None:
        """Puts the message back, to be its tenant's next. Owed if Redis cannot be reached.

        Unless it is a `strike`, the delivery does not count. To hand several back in their order, begin with the last.
        A message that `is_preempted` makes room for one of a better level; how often it did is kept with it.
        """
        args: list[str | int] = [self.owner, lease_id, int(strike), int(is_preempted)]
        self._settle(lease_id, lambda: self._expect_owned(self._release(args=args), "release"))

    def postpone(self, lease_id: str, seconds: float, *, keeps_place: bool = False) -> None:
        """Nobody holds the message until then; whoever reaps puts it back, late by a second at most. No delivery.

        It waits, and ages, from then on; or, with `keeps_place`, as if it had waited all the time. Owed if Redis cannot
        be reached.
        """
        args: list[str | float] = [self.owner, lease_id, seconds, int(keeps_place)]
        self._settle(lease_id, lambda: self._expect_owned(self._postpone(args=args), "postponement"))

    def bury(self, lease_id: str, why: DeadLetterReason, detail: str = "") -> None:
        """Makes the message a dead letter; `detail` is what is known beyond why. Owed if Redis cannot be reached."""
        reason = why.saying(detail) if detail else str(why)

        def bury() -> None:
            buried = self._bury(args=[self.owner, lease_id, reason])
            self._expect_owned(bool(buried), "bury")
            if buried:
                list_name, body, deliveries, bound_id = buried
                letter = DeadLetter(reason, list_name.decode(), deliveries, body, bound_id=_id_of(bound_id))
                self._report_dead(letter)

        self._settle(lease_id, bury)

    def tick(self) -> None:
        """To be called every third of the lease: renews what is held and pays what is owed."""
        try:
            self._renew_held()
            self._pay_owed()
        except REDIS_ERRORS as error:
            self._refused = True
            logger.warning("leases not renewed: %s; %d held, %d owed", error, len(self._held), len(self._owed))

    def _pay_owed(self) -> None:
        """Pays each debt that the server accepts. Raises only where the server cannot be reached."""
        refusal = None
        for lease_id, settle in list(self._owed.items()):
            try:
                settle()
            except CONNECTION_ERRORS:
                raise
            except redis.RedisError as error:  # of this debt: one that cannot be paid must not keep others from it
                refusal = error
            else:
                self._owed.pop(lease_id, None)
        if refusal is not None:
            logger.warning("%d lease(s) still not settled, the last because: %s", len(self._owed), refusal)

    def reap(self) -> int:
        """Puts back the messages of workers that fell silent, whoever they were. Redis's errors pass through."""
        try:
            if self._refused:
                self._renew_held()  # the outage is over only when this is taken
                self.pause_reaping()
            if self._clock() < self._reap_from:
                return 0
            self._renew_if_late()
            reaped, problem = self._reap(args=[_REAPED_AT_ONCE])
        except REDIS_ERRORS:
            self._refused = True
            raise
        if reaped:
            logger.warning("put back %d message(s) whose lease had run out", reaped)
        if problem:
            logger.warning("messages whose lease has run out are not put back: %s", problem.decode(errors="replace"))
            self.on_refused(problem.decode(errors="replace"))
        return int(reaped)

    def pause_reaping(self) -> None:
        """After an outage every lease may look expired: first give the other workers time to come back and renew."""
        self._refused = False
        self._reap_from = self._clock() + self.lease_seconds

    def _settle(self, lease_id: str, settle: Callable[[], None]) -> None:
        self.let_go(lease_id)
        try:
            settle()
        except REDIS_ERRORS as error:
            self._owed[lease_id] = settle
            logger.warning("lease %s not settled yet: %s; %d owed", lease_id, error, len(self._owed))

    def _expect_owned(self, owned: int, action: str) -> None:
        if not owned:
            logger.warning("%s of a lease that was lost: another worker has the message", action)

    def _renew_if_late(self) -> None:
        # This process may have been stopped or stuck for long: see what it has lost before it takes or reaps anything.
        if self._clock() - self._renewed_at > self.lease_seconds / 2:
            self._renew_held()

    def _renew_held(self) -> None:
        if self._held or self._refused:  # the script writes even where it has nothing to renew
            for lease_id in self._renew(args=[self.owner, self.lease_seconds, *self._held]):
                self._drop_lost(lease_id.decode())
        self._renewed_at = self._clock()

    def _drop_lost(self, lease_id: str) -> None:
        if lease_id in self._held:
            logger.warning("lease %s was lost: another worker may have the message", lease_id)
            held = self._held[lease_id]
            self.let_go(lease_id)
            self.on_lost(held)

    def _report_dead(self, letter: DeadLetter) -> None:
        about = (letter.queue, letter.deliveries, letter.reason, letter.described)
        logger.error("dead letter in %s after %d deliveries: %s; %s", *about)
        self.on_dead_letter(letter)


def _id_of(bound_id: bytes) -> str | None:
    return bound_id.decode(errors="replace") or None


def _leased_message(
    lease_id: bytes,
    list_name: bytes,
    body: bytes,
    deliveries: int,
    quota: int,
    bound_id: bytes,
    waited: bytes,
    level: bytes,
    preemptions: int,
) -> LeasedMessage:
    return LeasedMessage(
        lease_id.decode(),
        list_name.decode(),
        body,
        deliveries,
        quota,
        _id_of(bound_id),
        int(waited) / 1e6 if waited else None,
        level_of(level.decode()),
        preemptions,
    )
