"""`Leases`: fetches messages under a lease, renews the leases, and settles each message at the end.

Each script is about one queue. `worker_leases.py` serves queues of several servers.

A fetched message stays in Redis under a lease, which the holder renews. If the holder stops renewing, another worker
returns the message to the queue once the lease has expired by Redis's clock.

The scripts choose which message is fetched. First they sort new messages: they move each from the list to which its
producer pushed it to the sorted set of its tenant. Then tenants get shares of tokens by their weights
(`lua/ready_prelude.lua`). Nothing here knows Celery or kombu; see `transport.py`.
"""

import logging
import math
import time
import uuid
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from typing import Any, Final

import redis

from headrace_broker.keys import queue_lists, queue_of
from headrace_broker.queue.dead_letters import DeadLetter
from headrace_broker.queue.fair_share import FairShare
from headrace_broker.queue.final_writes import FinalWrites
from headrace_broker.queue.free_slots import FreeSlots
from headrace_broker.queue.leased_message import LeasedMessage, id_of, leased_message
from headrace_broker.queue.message_ending import MessageEnding
from headrace_broker.queue.reaper import Reaper
from headrace_broker.scripts import script
from headrace_broker.server.connections import CONNECTION_ERRORS, REDIS_ERRORS, address_of, is_fault_of_server
from headrace_broker.streams.grant import Grant
from headrace_broker.usage.entry import UsageEntry
from headrace_wire.codes import DeadLetterReason

logger = logging.getLogger(__name__)

_PURGED_AT_ONCE: Final = 500
_REFUSED_AT_ONCE: Final = 100
"""One fetch returns at most about this many messages over a quota, as the worker has to refuse each of them."""
PREFIXES_KEPT: Final = 64
"""With prefix affinity: of so many latest prefixes a process prefers messages."""
_LONGEST_PREFIX: Final = 32
"""In characters; the same as in `lua/tenant_prelude.lua`."""
_SORT_ROUNDS: Final = 30
"""The most scripts, of some milliseconds each, that one fetch runs to sort new messages."""
_SORT_ONLY_ROUNDS: Final = 3
"""The same for `Leases.sort`, which fetches nothing."""


_NO_ENDING: Final = MessageEnding()

_PRELUDES: Final = ("key_checks", "tenant_prelude", "lease_prelude", "ready_prelude")
_ENDINGS: Final = ("ack", "dead_letter")
"""The scripts that end a message, and so count what it has used."""
SCRIPTS: Final = {
    "fetch": script(*_PRELUDES, "due_prelude", "home_prelude", "lease_fetch"),
    "bind": script(*_PRELUDES, "home_prelude", "lease_bind"),
    **{
        name: script(*_PRELUDES, "budget_prelude", "usage_prelude", "final_writes_prelude", f"lease_{name}")
        for name in _ENDINGS
    },
    **{
        name: script(*_PRELUDES, f"lease_{name}")
        for name in (
            "wake",
            "renew",
            "requeue",
            "postpone",
            "reap",
            "purge",
            "take_delayed",
            "regrant",
        )
    },
}


class Leases:
    """One process's leases of queues in one Redis database; used by one thread only.

    It outlives every connection: a settlement that fails is pending, and `tick` retries it. `on_lost` is called with
    the object that `hold` got for each lost lease. `on_dead_letter` is called with each message that this process makes
    a dead letter, and `on_refused` with the reason when messages cannot be taken or returned. `on_offered` is called
    when a fetch has left messages to the holders of their conversations, with the seconds after which any worker may
    take all of them. This worker has to fetch again then, because the holder may be dead. `on_due` is called when
    a fetch has left messages with a due time, with the seconds until one of them must start. This worker has to fetch
    again then. `token_seconds` returns the time in which one request gets one token, or None if it is not measured.
    """

    def __init__(
        self,
        client: "redis.Redis",
        *,
        lease_seconds: float,
        delivery_limit: int,
        fair_share: FairShare | None = None,
        usage_days: int = 0,
        result_seconds: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client: Final = client
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
        self.on_due: Callable[[float], None] = lambda _seconds: None
        self.token_seconds: Callable[[], float | None] = lambda: None
        self.away_homes: Callable[[], Collection[str]] = tuple
        """Returns the stream servers that this worker cannot write to. It leaves their messages in the queue."""
        self._queues: Final[dict[str, str]] = {}
        """By lease id of each message that was fetched and is not settled: its queue."""
        self._held: Final[dict[str, Any]] = {}
        self._pending: Final[dict[str, Callable[[], None]]] = {}
        self._endings: Final[dict[str, MessageEnding]] = {}
        self._kept: Final = usage_days, result_seconds
        self._clock: Final = clock
        self.slots: Final = FreeSlots(client, self.owner, has_grace=self._fair_share.has_grace, clock=clock)
        self._renewed_at = clock()
        self._reap_from = clock()
        self._refused = False
        """A command failed, and Redis has accepted no write since."""
        self.away_seconds = 0.0
        """How long the server is left alone after it could not be reached: each try blocks the worker."""
        self._away_until = -math.inf
        self._away_because = ""
        self._run: Final = {name: each.bound(client) for name, each in SCRIPTS.items()}
        self._reaper: Final = Reaper(client, self._run["reap"], self.owner, lambda why: self.on_refused(why), clock)

    def __len__(self) -> int:
        """Return how many messages are held."""
        return len(self._held)

    def serve(self, queue: str) -> None:
        """Be a candidate for the reaper of this queue from now on, see `reap`."""
        self._reaper.serve(queue)

    @property
    def reaped(self) -> set[str]:
        """The queues of which this process was the reaper when it last tried."""
        return self._reaper.reaped

    @property
    def is_alone(self) -> bool:
        """Whether no other process has served these queues for some seconds."""
        return self._reaper.is_alone

    @property
    def away(self) -> str | None:
        """The queues, the server, and why it could not be reached, while it is left alone; else None."""
        return self._away_because if self._clock() < self._away_until else None

    def failed(self, error: Exception) -> str:
        """Leave the server alone for `away_seconds` if it could not be reached. Return the error with its address."""
        described = f"{', '.join(self._reaper.served)} on {address_of(self.client)}: {error}"
        if self.away_seconds and isinstance(error, CONNECTION_ERRORS):
            self._away_until, self._away_because = self._clock() + self.away_seconds, described
        return described

    def has(self, lease_id: str) -> bool:
        """Return whether the message was fetched by this object and is not settled."""
        return lease_id in self._queues

    def fetch(
        self, lists: Sequence[str], count: int, *, taken_from: int | None = None, split_from: int | None = None
    ) -> list[LeasedMessage]:
        """Lease messages with up to `count` choices in all, from the first lists of one queue that have messages.

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
        self,
        lists: Sequence[str],
        count: int,
        *,
        taken_from: int | None = None,
        split_from: int | None = None,
        served: int | None = None,
    ) -> Generator[list[LeasedMessage], None, int]:
        """Fetch like `fetch`, one script at each step, so that an event loop can do other work between the scripts.

        With `served`, only messages that wait in the first `served` lists are taken. Returns the number of the first
        later list that has messages; 0 if there is none.
        """
        self._renew_if_late()
        first_unserved = 0
        policy = self._packed_policy()
        unsorted, rounds_left, num_messages, problem = 1, _SORT_ROUNDS, 0, ""
        while unsorted:
            is_to_sort = rounds_left > 0 and num_messages < _REFUSED_AT_ONCE and not problem
            rounds_left -= 1
            messages: list[LeasedMessage] = []
            mode = "sort" if is_to_sort else ""
            limits = (taken_from, split_from, served)
            unsorted, found, first_unserved = self._fetch_once(lists, count, policy, mode, messages, limits)
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
        return first_unserved

    @property
    def has_grace(self) -> bool:
        """Whether messages wait for the holder of their conversation. Then this worker waits for its own token, too."""
        return self._fair_share.has_grace

    def wake(self, lists: Sequence[str]) -> None:
        """Let the messages that wait in these lists of one queue wake another worker. Redis's errors pass through.

        A worker that a message or the wake-up token woke calls it if it cannot fetch: no other worker was woken.
        """
        self._run["wake"](queue=queue_of(lists[0]), list=lists)

    def bind(self, message: LeasedMessage, request_id: object) -> str | None:
        """Bind the request id to the message. Return the stream server of the request; '' if it is the main server.

        Returns None if the request id is bound to another message. Redis's errors pass through.

        The scripts bind the id when they sort a message, if they can read it. This call is for the other messages, and
        for those that a worker of an earlier version sorted. `request_id` is the id in the decoded message, and
        replaces what the scripts have read.
        """
        if not isinstance(request_id, str) or request_id == message.bound_id:
            return message.home
        queue = queue_of(message.list_name)
        is_bound, home = self._run["bind"](self.owner, message.lease_id, request_id, queue=queue)
        return home.decode() if is_bound else None

    def regrant(self, lease_id: str, at_least: int) -> Grant | None:
        """Give the lease a number above `at_least`; None if it is lost. Redis's errors pass through.

        For a claim that its stream has refused as stale: `at_least` is the number of the stream's last attempt.
        """
        return Grant.of(self._run_on("regrant", lease_id, at_least), self.owner, lease_id)

    def sort(self, lists: Sequence[str]) -> None:
        """Sort new messages of one queue while there is no room to take them. Redis's errors pass through.

        If its producer gives no enqueue time, a message's age counts from the time at which it is first sorted.
        """
        policy = self._packed_policy()
        for _ in range(_SORT_ONLY_ROUNDS):
            unsorted, problem, _ = self._fetch_once(lists, 0, policy, "sort only", [])
            if problem:
                raise redis.ResponseError(problem)
            if not unsorted:
                return

    def _packed_policy(self) -> bytes:
        return self._fair_share.packed(self._prefixes, self.token_seconds(), self.away_homes())

    def _fetch_once(
        self,
        lists: Sequence[str],
        count: int,
        policy: bytes,
        mode: str,
        messages: list[LeasedMessage],
        limits: tuple[int | None, int | None, int | None] = (None, None, None),
    ) -> tuple[int, str, int]:
        """Run one script and append the messages that it leases to `messages`.

        Returns how many messages are left unsorted, the problem that blocks messages, or '', and the number of the
        first list that was not served and has messages, or 0.
        """
        queue = queue_of(lists[0])
        given = ("" if limit is None else limit for limit in limits)
        leased, dead, unsorted, problem, retry_after, first_unserved, due_after = self._run["fetch"](
            count, self.owner, self.lease_seconds, self.delivery_limit, policy, mode, *given, queue=queue, list=lists
        )
        if retry_after:
            self.on_offered(int(retry_after) / 1e6)
        if due_after:
            self.on_due(int(due_after) / 1e6)
        for list_name, body, deliveries, reason, bound_id, home in dead:
            facts = (reason.decode(), list_name.decode(), deliveries, body)
            letter = DeadLetter(*facts, bound_id=id_of(bound_id), home=home.decode())
            self._report_dead(letter)
        messages += [leased_message(fields, self.owner) for fields in leased]
        self._queues.update({message.lease_id: queue for message in messages})
        if not unsorted and sum(message.choices for message in messages if not message.over_quota) >= count:
            self.slots.filled(queue)
        return unsorted, problem.decode(errors="replace"), first_unserved

    def take_delayed(self, lists: Sequence[str], count: int) -> list[LeasedMessage]:
        """Lease up to `count` delayed messages of one queue. Redis's errors pass through."""
        queue = queue_of(lists[0])
        taken = self._run["take_delayed"](count, self.owner, self.lease_seconds, queue=queue, list=lists)
        messages = []
        for raw_id, name, body, number, home in taken:
            lease_id = raw_id.decode()
            grant = Grant.of(number, self.owner, lease_id)
            messages.append(LeasedMessage(lease_id, name.decode(), body, 0, grant=grant, home=home.decode()))
        self._queues.update({message.lease_id: queue for message in messages})
        return messages

    def purge(self, lists: Sequence[str]) -> int:
        """Delete the waiting messages of one queue that are sorted; return how many. Redis's errors pass through."""
        purged = 0
        while deleted := self._run["purge"](_PURGED_AT_ONCE, queue=queue_of(lists[0]), list=lists):
            purged += deleted
        return purged

    def hold(self, lease_id: str, held: Any) -> None:
        """Renew this lease from now on. `on_lost` is called with `held` if the lease is lost."""
        self._held[lease_id] = held
        self._endings.setdefault(lease_id, MessageEnding())

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
        self._stop_renewing(lease_id)
        self._queues.pop(lease_id, None)

    def _stop_renewing(self, lease_id: str) -> None:
        self._held.pop(lease_id, None)
        self._endings.pop(lease_id, None)

    def cost(self, lease_id: str, tokens: int, entry: UsageEntry | None = None) -> None:
        """Set how many tokens of prompt and output the message cost. `ack` charges them to its tenant.

        `ack` and `dead_letter` add the entry to the usage ledger, and release the API key's reservation. None:
        the message is not counted.
        """
        if (ending := self._endings.get(lease_id)) is not None:
            ending.tokens, ending.entry = tokens, b"" if entry is None else entry.packed(*self._kept)

    def send(self, lease_id: str, writes: FinalWrites) -> None:
        """Let the script that settles the message make these writes. Any thread may call it."""
        # It makes no ending: if the lease is lost meanwhile, nobody would remove it.
        if (ending := self._endings.get(lease_id)) is not None:
            ending.writes = writes

    def ack(self, lease_id: str) -> None:
        """Acknowledge the message: it is done. If Redis fails, `tick` retries."""
        ending = self._endings.get(lease_id, _NO_ENDING)
        args = ending.tokens, ending.entry
        self._settle(
            lease_id, lambda: self._expect_owned(self._run_on("ack", lease_id, *args, send=ending.writes), "ack")
        )

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
        ending = self._endings.get(lease_id, _NO_ENDING)

        def dead_letter() -> None:
            moved = self._run_on("dead_letter", lease_id, reason, ending.entry, send=ending.writes)
            self._expect_owned(bool(moved), "dead_letter")
            if moved:
                list_name, body, deliveries, bound_id, home = moved
                facts = (reason, list_name.decode(), deliveries, body)
                letter = DeadLetter(*facts, bound_id=id_of(bound_id), home=home.decode())
                self._report_dead(letter)

        self._settle(lease_id, dead_letter)

    def tick(self) -> None:
        """Renew the held leases and retry the pending settlements. Call it after every third of `lease_seconds`.

        A server that is away is tried all the same, until the leases there have expired.
        """
        if self.away and self._clock() - self._renewed_at > self.lease_seconds:
            return
        try:
            self._renew_held()
            self._retry_pending()
        except REDIS_ERRORS as error:
            self._refused = True
            num = len(self._held), len(self._pending)
            logger.warning("leases not renewed: %s; %d held, %d pending", self.failed(error), *num)

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
                self._queues.pop(lease_id, None)
        if refusal is not None:
            logger.warning("%d settlement(s) still pending, last error: %s", len(self._pending), refusal)

    def reap(self, *queues: str) -> int:
        """Return messages of expired leases to their queues; return how many.

        A key of the wrong type is reported, and the other queues are reaped. Redis's other errors pass through.

        Without arguments it does so for the queues of `serve`. One worker is the reaper of a queue, and the calls of
        the others do nothing. If the reaper does not call this for `keys.REAPER_MILLISECONDS`, its deputy is the
        reaper. Both renew their rights by each call. While the queue has no message, they do so by every second call,
        within `keys.RESTING_REAPER_MILLISECONDS`. The others look only once in `keys.ELECTION_SECONDS` whether one of
        the two is missing. With arguments it does so for these queues in any case.

        One call returns 500 messages of a queue at most. It also checks a few stored messages, and returns those that
        are neither leased nor waiting. If messages wait in the queue, it wakes a worker, because the one that they woke
        may have died.
        """
        try:
            if self._refused:
                self._renew_held(queues)  # the outage is over only when Redis accepts this
                self.pause_reaping()
            if self._clock() < self._reap_from:  # another worker may be able to reap
                self._reaper.forget_roles()
                self._for_each(queues or self._reaper.served, self._pause_reaper)
                return 0
            self._renew_if_late()
            reap = self._reaper.reap_without_role if queues else self._reaper.reap
            reaped: list[int] = []
            self._for_each(queues or self._reaper.served, lambda queue: reaped.append(reap(queue)))
            return sum(reaped)
        except REDIS_ERRORS as error:
            self._refused = True
            self._reaper.forget_roles()
            self.failed(error)
            raise

    def _pause_reaper(self, queue: str) -> None:
        self._reaper.pause(queue)
        self.wake(queue_lists(queue))

    def _for_each(self, queues: Iterable[str], do: Callable[[str], None]) -> None:
        """Do it for each queue. A key of the wrong type is reported, and the other queues are served.

        An error of the whole server is raised: at once if it cannot be reached, else at the end.
        """
        fault = None
        for queue in queues:
            try:
                do(queue)
            except redis.ResponseError as error:
                fault = error if is_fault_of_server(error) else fault
                logger.warning("leases of queue %s not served: %s", queue, error)
                self.on_refused(str(error))
        if fault is not None:
            raise fault

    def pause_reaping(self) -> None:
        """Reap nothing for the time of a lease: after an outage, the other workers need time to renew theirs."""
        self._refused = False
        self._reap_from = self._clock() + self.lease_seconds

    def _settle_by(self, action: str, lease_id: str, *args: str | bytes | float) -> None:
        """Settle the message by the script of this name."""
        self._settle(lease_id, lambda: self._expect_owned(self._run_on(action, lease_id, *args), action))

    def _run_on(self, action: str, lease_id: str, *args: str | bytes | float, send: FinalWrites | None = None) -> Any:
        """Run the script of this name on one message. Return 0 if this object no longer has the message."""
        queue = self._queues.get(lease_id)
        if queue is None:
            return 0
        if send is None:
            return self._run[action](self.owner, lease_id, *args, queue=queue)
        keys, writes = send.arguments()
        return self._run[action](self.owner, lease_id, *args, *writes, queue=queue, key=keys)

    def _settle(self, lease_id: str, settle: Callable[[], None]) -> None:
        self._stop_renewing(lease_id)
        if self.away:
            self._pending[lease_id] = settle
            return
        try:
            settle()
        except REDIS_ERRORS as error:
            self._pending[lease_id] = settle
            num = len(self._pending)
            logger.warning("lease %s not settled yet: %s; %d pending", lease_id, self.failed(error), num)
        else:
            self._queues.pop(lease_id, None)

    def _expect_owned(self, owned: int, action: str) -> None:
        if not owned:
            logger.warning("%s of a lost lease: another worker has the message", action)

    def _renew_if_late(self) -> None:
        # If this process was stopped or blocked for long, find the lost leases before it takes or reaps anything.
        if self._clock() - self._renewed_at > self.lease_seconds / 2:
            self._renew_held()

    def _renew_held(self, queues: Iterable[str] = ()) -> None:
        held: dict[str, list[str]] = {}
        for lease_id in list(self._held):
            if lease_id in self._queues:
                held.setdefault(self._queues[lease_id], []).append(lease_id)
            else:
                self._drop_lost(lease_id)
        # the script writes even if there is nothing to renew
        renewed = dict.fromkeys([*held, *((queues or self._reaper.served) if self._refused else ())])
        self._for_each(renewed, lambda queue: self._renew(queue, held.get(queue, ())))
        self._renewed_at = self._clock()

    def _renew(self, queue: str, lease_ids: Iterable[str]) -> None:
        for lease_id in self._run["renew"](self.owner, self.lease_seconds, *lease_ids, queue=queue):
            self._drop_lost(lease_id.decode())
            self._queues.pop(lease_id.decode(), None)

    def _drop_lost(self, lease_id: str) -> None:
        if lease_id in self._held:
            logger.warning("lease %s lost: another worker may have the message", lease_id)
            held = self._held[lease_id]
            self._stop_renewing(lease_id)
            self.on_lost(held)

    def _report_dead(self, letter: DeadLetter) -> None:
        about = (letter.queue, letter.deliveries, letter.reason, letter.described)
        logger.error("dead letter in %s after %d deliveries: %s; %s", *about)
        self.on_dead_letter(letter)
