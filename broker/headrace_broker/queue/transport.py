"""kombu's Redis transport with leases. The worker selects it by `broker_transport`; producers use stock kombu.

Stock kombu pops a message first and records it later, renews nothing, and restores by each worker's own clock. This
transport fetches messages with `leases.py`, which shares a queue among its tenants. It leases the queues whose names
begin with `headrace.` and those in the transport option `lease_queues`. Replies and control messages use kombu's own
code, and are delivered at most once.

Everything runs on the thread of kombu's event loop. A timer of that loop renews the leases, so code that blocks it for
longer than the lease loses the messages.
"""

import logging
import math
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from queue import Empty
from types import MappingProxyType
from typing import Any, ClassVar, Final

import redis
from kombu.exceptions import OperationalError
from kombu.transport import redis as kombu_redis
from kombu.transport import virtual

from headrace_broker.content import loads
from headrace_broker.errors import MalformedMessageError, TransportConfigurationError
from headrace_broker.keys import ALL_STEPS, QUEUE_PREFIX, arrived_key, sorted_ids_key, step_of
from headrace_broker.queue.blocking_wait import (
    BlockingWait,
    WaitPoller,
    holder_wake_up_command,
    wait_command,
    waiting_pool,
    wake_up_command,
)
from headrace_broker.queue.due_timer import DueTimer
from headrace_broker.queue.earlier_version import move_all
from headrace_broker.queue.fair_share import ARRIVAL
from headrace_broker.queue.lease_registry import LeaseRegistry
from headrace_broker.queue.leased_message import LeasedMessage
from headrace_broker.queue.loop_turn import Turn
from headrace_broker.queue.message_envelope import check_envelope, content_digest, open_envelope
from headrace_broker.queue.qos import QoS
from headrace_broker.queue.worker_leases import AWAY_SECONDS, WorkerLeases
from headrace_broker.queue.worker_port import DELIVERY, DeliveryInfo, WorkerPort
from headrace_broker.server.connections import CONNECTION_ERRORS, REDIS_ERRORS
from headrace_wire.codes import DeadLetterReason

logger = logging.getLogger(__name__)

_REFUSED_SECONDS: Final = 1.0
"""Pause after a server has refused a command, for example because it is out of memory or read-only."""

_TURN_SECONDS: Final = 0.01
"""Fetched messages are handed over for this long before the event loop does other work."""
_DEFAULT_PREFETCH_COUNT: Final = 16
_FITS_NOTHING_SECONDS: Final = 0.5
"""How long the wake-up token is ignored after a fetch has taken none of the waiting messages: they have too many
choices, or their stream servers are away. New messages end it."""


class Message(virtual.Message):
    """A message that `content.py` decodes, instead of kombu's serializers."""

    def _decode(self) -> Any:
        return loads(self.body, self.content_type)


class Channel(kombu_redis.Channel):
    """A channel whose task queues are leased.

    `serve` connects it to a worker with an engine. Without one, Celery's prefetch count bounds the held messages.
    """

    QoS = QoS
    Message = Message

    max_connections = 200  # one for each list, and some more
    lease_seconds = 15.0
    delivery_limit = 5
    lease_queues: tuple[str, ...] = ()
    tenant_weights: Mapping[str, float] = MappingProxyType({})
    ageing_seconds = 0.0
    tenant_quota = 0
    queue_urls: Mapping[str, str] = MappingProxyType({})
    prefix_affinity = False
    prefix_grace = 0.0
    tenant_order = ARRIVAL
    usage_days = 0
    result_seconds = 0
    preemption_wait_seconds = 0.0
    master_name: str | None = None
    from_transport_options = (
        *kombu_redis.Channel.from_transport_options,
        "lease_seconds",
        "delivery_limit",
        "lease_queues",
        "tenant_weights",
        "ageing_seconds",
        "tenant_quota",
        "queue_urls",
        "prefix_affinity",
        "prefix_grace",
        "tenant_order",
        "usage_days",
        "result_seconds",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.leased = False
        self.free_slots = self._free_prefetch_slots
        self.preemptible_slots: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.split_below: Callable[[], int] = lambda: ALL_STEPS
        self._fits_nothing_until = -math.inf
        """Monotonic time until which this worker is taken to have no use for the messages that wait."""
        self._preemption_timer: Any = None
        self._due_timer = DueTimer(self._on_due_time)
        self._waits: dict[tuple[Any, ...], BlockingWait] = {}
        self._wait_pools: dict[str, redis.ConnectionPool] = {}
        """By URL of `queue_urls`."""
        self._ask_again_at: dict[str, float] = {}
        """By queue: monotonic time until which it is left alone, because its server refused a command or is away."""
        self._fetched: deque[LeasedMessage] = deque()
        """Fetched, but not handed over yet, so that the event loop can do other work in between."""
        self._parts: Iterator[None] | None = None
        """The remaining parts of handing over the first of the fetched messages."""
        self._rounds: Iterator[list[LeasedMessage]] | None = None
        """The remaining scripts of a fetch."""
        self._preempting_slots = math.inf
        """Slots that the latest preempting fetch may still fill. At 0 or below, more messages may be waiting."""
        self._turn = Turn()
        super().__init__(*args, **kwargs)
        if self.global_keyprefix:
            raise TransportConfigurationError(
                f"global_keyprefix is {self.global_keyprefix!r}, but the lease transport needs an empty one"
            )
        self.leases: WorkerLeases = self.connection.lease_registry.of_channel(self)

    def serve(self, worker: WorkerPort) -> None:
        """Take messages for this worker from now on. Each new connection has a new channel, with the same leases."""
        self.free_slots, self.split_below = worker.free_slots, worker.split_below
        self.preemptible_slots = worker.preemptible_slots
        self.preemption_wait_seconds = worker.preemption_wait_seconds
        self.leases.report_to(
            on_lost=worker.lease_lost,
            on_dead_letter=worker.dead_lettered,
            on_refused=worker.refused,
            token_seconds=worker.token_seconds,
            away_homes=worker.away_homes,
        )

    def make_pool(self, parameters: dict[str, Any]) -> "redis.ConnectionPool":
        """Return a pool of connections with these kombu parameters."""
        return redis.ConnectionPool(**parameters)

    def basic_consume(self, queue: str, no_ack: bool, *args: Any, **kwargs: Any) -> Any:
        if queue not in self._fanout_queues:
            leased = self._is_leased(queue)
            if self.active_queues and leased != self.leased:
                raise TransportConfigurationError(
                    f"the queues {', '.join([*self.active_queues, queue])} cannot share a channel, as only some of them"
                    f" are leased: give all of them the prefix {QUEUE_PREFIX!r}, or name them in lease_queues"
                )
            if leased and no_ack:
                raise TransportConfigurationError(f"queue {queue} is leased, so its messages must be acknowledged")
            self.leased = leased
            if leased:
                leases = self.leases.of(queue)
                leases.serve(queue)
                leases.on_offered, leases.on_due = self._fetch_after, self._fetch_when_due
        return super().basic_consume(queue, no_ack, *args, **kwargs)

    def _is_leased(self, queue: str) -> bool:
        return queue.startswith(QUEUE_PREFIX) or queue in self.lease_queues

    def _free_prefetch_slots(self) -> int:
        """Return Celery's prefetch count, less the held messages: the free slots without an engine."""
        return (self.qos.prefetch_count or _DEFAULT_PREFETCH_COUNT) - len(self.leases)

    def _get(self, queue: str) -> Any:
        if self._is_leased(queue):
            raise TransportConfigurationError(f"queue {queue} is leased: consume it instead of getting single messages")
        return super()._get(queue)

    def _size(self, queue: str) -> int:
        """Return how many messages wait, sorted or not. A key of the wrong type counts as 0, so a worker can start."""
        size = 0
        try:
            if not self._is_leased(queue):
                return int(super()._size(queue))
            if self.leases.away(queue):
                return 0
            client: Any = self.leases.of(queue).client
            for name in self._lists_of(queue):
                size += client.llen(name) + client.llen(arrived_key(name)) + client.zcard(sorted_ids_key(name))
        except CONNECTION_ERRORS as error:
            if self.leases.is_on_main(queue):
                raise
            self.leases.failed(queue, error)
        except redis.ResponseError as error:
            if "WRONGTYPE" not in str(error):
                raise
            return 0
        return size

    def _purge(self, queue: str) -> int:
        if not self._is_leased(queue):
            return int(super()._purge(queue))
        lists = self._lists_of(queue)
        leases = self.leases.of(queue)
        move_all(leases.client, queue)
        pipe: Any
        with leases.client.pipeline() as pipe:
            for name in (*lists, *map(arrived_key, lists)):
                pipe.llen(name).delete(name)
            lengths = pipe.execute()[::2]
        return sum(lengths) + leases.purge(lists)

    def _lists_of(self, queue: str) -> list[str]:
        return [self._q_for_pri(queue, step) for step in self.priority_steps]

    def close(self) -> None:
        self._turn.close()
        self._rounds = None
        self._requeue_fetched()
        super().close()
        for pool in self._wait_pools.values():
            pool.disconnect()

    def _receive_one(self, subscriber: Any) -> Any:
        """Read a published message, such as a control message. No published message may end the worker."""
        try:
            return super()._receive_one(subscriber)
        except (*self.connection_errors, OperationalError, Empty):
            raise
        except Exception as error:  # noqa: BLE001  # the message may be malformed in any way
            logger.warning("published message dropped: %s", _shown(error))
            return None

    def _deliver_fanout_message(self, message: Any, exchange: str) -> Any:
        check_envelope(message)  # before kombu decompresses it
        return super()._deliver_fanout_message(message, exchange)

    @property
    def hands_over(self) -> bool:
        """Whether a fetch continues in later turns of the event loop."""
        return bool(self._fetched or self._rounds)

    def start_waits(self, poller: WaitPoller) -> None:
        """Start to wait for every list and wake-up token."""
        leaves_some = self.split_below() < ALL_STEPS or self.leases.leaves_some
        fits_nothing = time.monotonic() < self._fits_nothing_until and leaves_some
        for queue in self._open_queues():
            leases = self.leases.of(queue)
            commands = [*map(wait_command, self._lists_of(queue))]
            if not fits_nothing:  # else this worker cannot take any of the sorted messages now
                commands.append(wake_up_command(queue))
            if leases.has_grace:
                commands.append(holder_wake_up_command(queue, leases.owner))
            if self._start(poller, queue, commands):
                try:
                    leases.slots.tell(queue, self.free_slots())
                except CONNECTION_ERRORS as error:
                    self._failed(queue, error)

    def start_preempting_waits(self, poller: WaitPoller) -> None:
        """Without a free slot, start to wait for the lists whose messages may preempt running requests."""
        if self.hands_over or self._preemption_timer is not None:
            return
        preempted, count = self.preemptible_slots()
        if count <= 0:
            return
        steps = [step for step in self.priority_steps if step < preempted]
        for queue in self._open_queues():
            self._start(poller, queue, [wait_command(self._q_for_pri(queue, step)) for step in steps])

    def _start(self, poller: WaitPoller, queue: str, commands: Iterable[tuple[Any, ...]]) -> bool:
        """Start to wait for a queue. Return False if its server refuses, or is away and not the main one."""
        if self.leases.away(queue):  # since the list of open queues was made
            return False
        try:
            for command in commands:
                if command not in self._waits:
                    self._waits[command] = BlockingWait(self, self._wait_pool(queue), queue, command)
                self._waits[command].start(poller)
        except REDIS_ERRORS as error:
            self._failed(queue, error)
            return False
        return True

    def _wait_pool(self, queue: str) -> Any:
        """Return the pool whose connections wait for this queue."""
        url = self.queue_urls.get(queue)
        if url is None:
            return self.async_pool
        if url not in self._wait_pools:
            self._wait_pools[url] = waiting_pool(self, url)
        return self._wait_pools[url]

    def on_wait(self, wait: BlockingWait) -> bool:
        """Fetch after Redis has answered a blocking wait. Return False if nothing was fetched.

        Redis has woken no other worker. So if this one cannot fetch, it wakes another one.
        """
        try:
            if not wait.read_reply():
                return False
            may_fetch = self._is_ready_to_fetch() and self.free_slots() > 0 and wait.queue in self._open_queues()
            if not may_fetch:
                self._pass_on(wait)
        except REDIS_ERRORS as error:
            return self._fetch_past(wait.queue, error)
        if self.fetch():
            return True
        self.schedule_preempting_fetch()
        return False

    def _pass_on(self, wait: BlockingWait) -> None:
        """Wake another worker for the messages that have ended this wait. This worker cannot fetch them."""
        leases = self.leases.of(wait.queue)
        if leases.has_grace and wait.command == holder_wake_up_command(wait.queue, leases.owner):
            if self.hands_over and self.free_slots() > 0:  # it waits for this token again as soon as it can fetch
                leases.slots.wake_up_again(wait.queue)
                return
            leases.slots.withdraw(wait.queue)
        leases.wake(self._lists_of(wait.queue))

    def _fetch_after(self, seconds: float) -> None:
        """Fetch messages that this worker has left to others, if they still wait after these seconds."""
        if self.connection.loop is not None:
            self.connection.loop.call_later(seconds, self._on_grace_end)

    def _on_grace_end(self) -> None:
        if self._closing or not self.active_queues:
            return  # the reaper wakes a worker
        if self._is_ready_to_fetch() and self.free_slots() > 0:
            self.fetch()
            return
        for queue in self._open_queues():
            try:
                self.leases.of(queue).wake(self._lists_of(queue))
            except REDIS_ERRORS as error:
                self._failed(queue, error)

    def _fetch_when_due(self, seconds: float) -> None:
        """Fetch again when a waiting message must start by its due time. Then it may preempt running requests."""
        if self.connection.loop is not None:
            self._due_timer.set(self.connection.loop, seconds)

    def _on_due_time(self) -> None:
        if self._closing or not self.active_queues or self.fetch():
            return
        self.schedule_preempting_fetch()

    def schedule_remaining_preempting(self) -> None:
        """Schedule another preempting fetch if the last one filled its slots. Called before each poll."""
        if self._preempting_slots <= 0 and self._open_queues() and not self.hands_over:
            self.schedule_preempting_fetch()

    def schedule_preempting_fetch(self) -> None:
        """Fetch preempting messages after `preemption_wait_seconds`, if they can preempt anything then."""
        loop = self.connection.loop
        if loop is not None and self._preemption_timer is None and self.preemptible_slots()[1] > 0:
            self._preemption_timer = loop.call_later(self.preemption_wait_seconds, self._on_preemption_time)

    def _on_preemption_time(self) -> None:
        self._preemption_timer = None
        if self.fetch():  # there is room by now
            self._preempting_slots = 0
        else:
            self.fetch_preempting()
        self.connection.cycle.check_soon()  # no blocking waits were started while the timer ran

    def _fetch_past(self, queue: str, error: Exception) -> bool:
        """Handle a refused wait for one list. If only the type of its key is wrong, fetch from the other lists."""
        fetched = "WRONGTYPE" in str(error) and self.fetch()
        self._failed(queue, error)
        return fetched

    def _open_queues(self) -> list[str]:
        """Return the queues to fetch from now, in the order in which they are served."""
        now = time.monotonic()
        queues = self._queue_cycle.consume(len(self.active_queues))
        return [queue for queue in queues if now >= self._ask_again_at.get(queue, 0.0) and not self.leases.away(queue)]

    def fetch(self) -> bool:
        """Fetch messages for the free slots and hand them to their consumers. Return False if there were none.

        Long work continues in later turns of the event loop.
        """
        count = self.free_slots() if self._is_ready_to_fetch() else 0
        if count <= 0:
            return False
        below = self.split_below()
        self._rounds = self._fetch_in_rounds(count, split_from=self._num_lists_above(below))
        found = self._go_on()
        if not found and (below < ALL_STEPS or self.leases.leaves_some):
            self._fits_nothing_until = time.monotonic() + _FITS_NOTHING_SECONDS
        return found

    def _is_ready_to_fetch(self) -> bool:
        """Return whether a fetch may run now, if there are free slots."""
        is_consuming = self.leased and not self._closing and self._open_queues()
        return bool(is_consuming and not self.hands_over)

    def _fetch_in_rounds(self, count: int, **limits: int) -> Iterator[list[LeasedMessage]]:
        return self.leases.fetch_in_rounds(self._open_queues(), count, **limits, on_error=self._failed)

    def _num_lists_above(self, step: int) -> int:
        """Return how many of a queue's lists have a higher priority than this step."""
        return sum(other < step for other in self.priority_steps)

    def fetch_preempting(self) -> bool:
        """Without a free slot, fetch messages that preempt running requests. Return False if none may be preempted."""
        if not self._is_ready_to_fetch():
            return False
        step, count = self.preemptible_slots()
        if count <= 0:
            return False
        self._preempting_slots = count
        self._rounds = self._fetch_in_rounds(count, taken_from=self._num_lists_above(step))
        self._go_on()
        return True

    def _go_on(self) -> bool:
        """Fetch and hand over in this turn of the event loop and the next ones. Without a loop, do all of it now."""
        loop = self.connection.loop
        until = time.monotonic() + _TURN_SECONDS if loop is not None else math.inf
        found = False
        try:
            while self.hands_over:
                if self._fetched:
                    found = True
                    self._hand_over_part()
                else:
                    self._fetch_round()
                if time.monotonic() >= until:
                    break
        except BaseException:
            self._rounds = None
            self._turn.end()
            self._requeue_fetched()
            raise
        if self.hands_over:
            self._turn.begin(loop, self._go_on)
        else:
            self._turn.end()
            self.connection.cycle.check_soon()
        return found or self.hands_over

    def _fetch_round(self) -> None:
        assert self._rounds is not None
        messages = next(self._rounds, None)
        if messages is None:
            self._rounds = None
            if self._preempting_slots > 0:
                self._preempting_slots = math.inf
        else:
            self._fetched += messages
            self._preempting_slots -= sum(message.choices for message in messages if not message.over_quota)

    def _hand_over_part(self) -> None:
        parts = self._parts = self._parts or self._hand_over()
        try:
            next(parts)
        except StopIteration:
            self._parts = None

    def _requeue_fetched(self) -> None:
        self._parts = None
        while self._fetched:  # the last one first, which keeps their order in the queue
            self.leases.requeue(self._fetched.pop().lease_id)

    def _failed(self, queue: str, error: Exception) -> None:
        """Pause the fetches from a queue: a server that is out of memory or read-only recovers.

        Raises the error if the main server cannot be reached: then kombu connects again.
        """
        if not isinstance(error, redis.ResponseError) and self.leases.is_on_main(queue):
            raise error
        seconds = _REFUSED_SECONDS if isinstance(error, redis.ResponseError) else AWAY_SECONDS
        self._ask_again_at[queue] = time.monotonic() + seconds
        problem = self.leases.failed(queue, error)
        logger.warning("fetches from %s paused for %g s: %s", queue, seconds, problem)
        self.leases.on_refused(problem)

    def _hand_over(self) -> Iterator[None]:
        """Hand the first message to its consumer, in parts. No content of a message may end the worker."""
        message = self._fetched[0]
        queue = message.list_name.partition(self.sep)[0]
        payload: dict[str, Any] | None = None
        problem = ""
        try:
            payload = yield from self._payload(message, queue)
        except Exception as error:  # noqa: BLE001  # the message may be malformed in any way
            problem = _shown(error)
        self._fetched.popleft()  # not before: a channel that closes between two parts requeues it
        if payload is None:
            self.leases.dead_letter(message.lease_id, DeadLetterReason.UNDECODABLE, problem)
            return
        consume = self.connection._callbacks.get(queue)
        if consume is None:  # the consumer was cancelled in the meantime
            self.leases.requeue(message.lease_id)
            return
        try:
            home = self.leases.bind(message, payload["headers"].get("id"))
            if home is None:
                self.leases.dead_letter(message.lease_id, DeadLetterReason.DUPLICATE_ID)
                return
            if home != message.home:
                about = payload["properties"]["delivery_info"]
                about[DELIVERY] = replace(about[DELIVERY], home=home)
            consume(payload)
        except (*CONNECTION_ERRORS, OperationalError):
            self.leases.requeue(message.lease_id, is_counted=True)
            raise
        except redis.ResponseError as error:
            self.leases.requeue(message.lease_id)
            self._failed(queue, error)
        except Exception as error:  # noqa: BLE001  # one bad message must not end the worker
            # the error's own text may quote the message, and with it a prompt
            trace = "".join(traceback.format_tb(error.__traceback__))
            logger.error("message of queue %s not delivered: %s\n%s", queue, type(error).__name__, trace)
            self.leases.dead_letter(message.lease_id, DeadLetterReason.UNDELIVERABLE, type(error).__name__)

    def _payload(self, message: LeasedMessage, queue: str) -> Generator[None, None, dict[str, Any]]:
        """Return the payload for kombu, made in parts. Each takes 26 ms at most, measured with the largest message."""
        payload = open_envelope(message.body)
        yield
        content = content_digest(payload, queue)
        yield
        properties = payload["properties"]
        # Producers may choose equal tags; the lease id is unique among the messages in flight.
        properties["delivery_tag"] = message.lease_id
        properties["delivery_info"]["routing_key"] = queue
        properties["delivery_info"]["redelivered"] = message.deliveries > 1
        properties["delivery_info"][DELIVERY] = DeliveryInfo(
            content=content,
            queued_at=None if message.waited is None else time.monotonic() - message.waited,
            step=step_of(message.list_name),
            over_quota=message.over_quota,
            preemptions=message.preemptions,
            choices=message.choices,
            grant=message.grant,
            home=message.home,
            lost=message.lost,
        )
        # Decoded once, as it may be megabytes.
        payload["body"], properties["body_encoding"] = self.Message(payload, channel=self).body, None
        self.leases.remember_prefix(message, payload["headers"].get("prefix"))
        yield
        return payload


def _shown(error: Exception) -> str:
    """Describe the error, without the text of errors that may quote the message."""
    return str(error) if isinstance(error, MalformedMessageError) else type(error).__name__


class Transport(kombu_redis.Transport):
    """Selected by `broker_transport='headrace_broker.queue.transport:Transport'` with an ordinary redis:// URL."""

    Channel = Channel
    loop: Any = None
    """kombu's event loop; None if none is running."""
    lease_registry: ClassVar[LeaseRegistry] = LeaseRegistry()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cycle = WaitPoller()

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        self.loop = loop
        # Renew before kombu reaps on this new connection, or it would reap our own leases first.
        for leases in {channel.leases for channel in self.channels}:
            self.lease_registry.keep_alive(leases, loop)
        self.cycle.set_readers(self.on_readable, loop.readers)
        before = set(loop.on_tick)
        super().register_with_event_loop(connection, loop)
        for check in loop.on_tick - before:
            loop.on_tick.remove(check)
            loop.on_tick.add(partial(self.cycle.prepare, check))
