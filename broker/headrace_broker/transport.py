"""kombu's Redis transport with leases: select it on the worker by `broker_transport`; producers stay stock.

Stock kombu pops a message first and records it later, renews nothing, and restores by each worker's own clock. Here a
queue is fetched with `leases.py` instead, by which tenants share it. Only queues whose name begins with `headrace.`, or
that the transport option `lease_queues` names, are leased; replies and control messages keep kombu's own way, and are
delivered at most once.

Everything runs on the thread of kombu's event loop. Leases are renewed by a timer of that loop, so whatever blocks it
for longer than the lease loses the messages.
"""

import logging
import math
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from queue import Empty
from types import MappingProxyType
from typing import Any, ClassVar, Final

import redis
from kombu.exceptions import OperationalError
from kombu.transport import redis as kombu_redis
from kombu.transport import virtual
from redis.backoff import NoBackoff
from redis.retry import Retry

from headrace_broker.connections import CONNECTION_ERRORS
from headrace_broker.content import loads
from headrace_broker.doorbell import Doorbell, DoorbellPoller, wait_command
from headrace_broker.envelope import check_envelope, content_digest, open_envelope
from headrace_broker.errors import MalformedMessageError, TransportConfigurationError
from headrace_broker.fair_share import FairShare
from headrace_broker.keys import QUEUE_PREFIX, bell_key, level_of, sorted_ids_key
from headrace_broker.leases import LeasedMessage, Leases
from headrace_broker.reasons import DeadLetterReason

logger = logging.getLogger(__name__)

_REFUSED_SECONDS: Final = 1.0
"""How long a server that refuses commands, being out of memory or read-only, is left alone."""

OVER_QUOTA: Final = "headrace_over_quota"
"""In a message's delivery_info: the quota, where the message is over it and only to be refused, or 0."""

CONTENT: Final = "headrace_content"
"""In a message's delivery_info: `envelope.content_digest` of it."""

QUEUED_AT: Final = "headrace_queued_at"
"""In a message's delivery_info: since when it waits by Redis's clock, as a moment of this process's monotonic clock; or
None, where that is not known."""

STEP: Final = "headrace_step"
"""In a message's delivery_info: the priority step of the list that it came by."""


PREEMPTIONS: Final = "headrace_preemptions"
"""In a message's delivery_info: `LeasedMessage.preemptions`."""

_COMMAND_TIMEOUT: Final = 5.0
_TURN_SECONDS: Final = 0.01
"""For so long fetched messages are handed over before the event loop is to see to other things."""
_DEFAULT_CREDIT: Final = 16


class Turn:
    """Calls something at each turn of kombu's event loop, behind what else has come."""

    def __init__(self) -> None:
        self._loop: Any = None
        self._fd: int | None = None

    def begin(self, loop: Any, callback: Callable[[], object]) -> None:
        """Until `end`. The loop would wait for up to a second before it saw what a callback asks it to do soon."""
        if self._loop is None:
            self._fd = os.eventfd(1) if self._fd is None else self._fd  # always readable, as nobody reads it
            self._loop = loop
            loop.add_reader(self._fd, callback)

    def end(self) -> None:
        if self._loop is not None:
            self._loop.remove(self._fd)
            self._loop = None

    def close(self) -> None:
        """As `end`, for good."""
        self.end()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class LeaseRegistry:
    """The leases of this process, one `Leases` a Redis database. They outlive channels, transports and connections."""

    def __init__(self) -> None:
        self._leases: Final[dict[tuple[Any, ...], Leases]] = {}
        self._timers: Final[dict[Leases, Any]] = {}

    def of_channel(self, channel: "Channel") -> Leases:
        parameters = channel._connparams()
        names = ("host", "port", "path", "db", "username")
        database = (channel.master_name, *(parameters.get(name) for name in names))
        if database not in self._leases:
            parameters |= {"socket_timeout": _COMMAND_TIMEOUT, "protocol": 2, "retry": Retry(NoBackoff(), 0)}
            client = redis.Redis(connection_pool=channel.make_pool(parameters))
            self._leases[database] = Leases(
                client,
                lease_seconds=channel.lease_seconds,
                delivery_limit=channel.delivery_limit,
                fair_share=FairShare(
                    channel.tenant_weights, channel.ageing_seconds, channel.tenant_quota, channel.prefix_affinity
                ),
            )
        return self._leases[database]

    def keep_alive(self, leases: Leases, loop: Any) -> None:
        """Renews now, and from now on by a timer of this event loop."""
        timer = self._timers.pop(leases, None)
        if timer is not None:  # this is a new connection after a loss
            timer.cancel()
            leases.pause_reaping()
        leases.tick()
        self._timers[leases] = loop.call_repeatedly(leases.lease_seconds / 3, leases.tick)


class QoS(virtual.QoS):
    """Sends acknowledgements to the leases."""

    # A channel that closes gives nothing back: leased messages stay held, and others cannot be given to a lost server.
    restore_at_shutdown = False

    def append(self, message: Any, delivery_tag: str) -> None:
        if self.channel.leased:
            self.channel.leases.hold(delivery_tag, message)
        else:
            super().append(message, delivery_tag)

    def ack(self, delivery_tag: str) -> None:
        if self.channel.leased:
            self.channel.leases.ack(delivery_tag)
        else:
            super().ack(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        if not self.channel.leased:
            super().reject(delivery_tag, requeue=requeue)
        elif requeue:
            self.channel.leases.release(delivery_tag, strike=True)  # a rejection is because of the message
        else:
            self.channel.leases.bury(delivery_tag, DeadLetterReason.REJECTED)

    def can_consume(self) -> bool:
        if self.channel.leased:
            return bool(not self.channel.hands_over and self.channel.credit() > 0)
        return bool(super().can_consume())

    def restore_visible(self, *_args: Any, **_kwargs: Any) -> None:
        # kombu's timer calls this on any one channel, so it must not depend on that channel's queues
        try:
            self.channel.leases.reap()
        except redis.ResponseError as error:
            logger.warning("the leases of silent workers are not looked at: %s", error)
            self.channel.leases.on_refused(str(error))


class Message(virtual.Message):
    """A message that is decoded by `content.py` alone."""

    def _decode(self) -> Any:
        return loads(self.body, self.content_type)


class Channel(kombu_redis.Channel):
    """A channel whose task queues are leased.

    `credit` says how many messages may be fetched now; set it to the engine's free capacity. It is asked often, and
    anew on the channel of each connection.

    `preemption_credit` matters where there is none: it says which level of what runs would make room, and how many
    messages of better levels may be taken in its place. A message that has arrived there is taken when
    `preemption_wait_seconds` have passed in which no other worker has taken it.
    """

    QoS = QoS
    Message = Message

    _in_poll: Any = None
    max_connections = 200  # one for each list, and some
    lease_seconds = 15.0
    delivery_limit = 5
    lease_queues: tuple[str, ...] = ()
    tenant_weights: Mapping[str, float] = MappingProxyType({})
    ageing_seconds = 0.0
    tenant_quota = 0
    prefix_affinity = False
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
        "prefix_affinity",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.leased = False
        self.credit = self._prefetch_credit
        self.preemption_credit: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._preemption_timer: Any = None
        self._doorbells: dict[str, Doorbell] = {}
        self._awaits_doorbell = False
        self._ask_again_at = 0.0
        self._fetched: deque[LeasedMessage] = deque()
        """Not handed over yet, as the event loop is to see to other things in between."""
        self._steps: Iterator[None] | None = None
        """What is left of handing over the first of them."""
        self._rounds: Iterator[list[LeasedMessage]] | None = None
        """What is left of a fetch."""
        self._better_credit = math.inf
        """What is left of the credit of the latest fetch of better messages; used up: others may be left."""
        self._turn = Turn()
        super().__init__(*args, **kwargs)
        if self.global_keyprefix:
            raise TransportConfigurationError(
                f"global_keyprefix is {self.global_keyprefix!r}, but the lease transport needs an empty one"
            )
        self.leases: Leases = self.connection.lease_registry.of_channel(self)

    def make_pool(self, parameters: dict[str, Any]) -> "redis.ConnectionPool":
        """A pool with kombu's parameters of a connection."""
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
        return super().basic_consume(queue, no_ack, *args, **kwargs)

    def _is_leased(self, queue: str) -> bool:
        return queue.startswith(QUEUE_PREFIX) or queue in self.lease_queues

    def _prefetch_credit(self) -> int:
        """Without an engine: Celery's prefetch count."""
        return (self.qos.prefetch_count or _DEFAULT_CREDIT) - len(self.leases)

    def _get(self, queue: str) -> Any:
        if self._is_leased(queue):
            raise TransportConfigurationError(f"queue {queue} is leased: it is consumed, not asked for single messages")
        return super()._get(queue)

    def _size(self, queue: str) -> int:
        """Messages that wait, sorted or not; 0 where a key has the wrong type, as a worker asks when it starts."""
        try:
            size: int = super()._size(queue)
            if self._is_leased(queue):
                with self.conn_or_acquire() as client:
                    size += sum(client.zcard(sorted_ids_key(name)) for name in self._lists_of(queue))
        except redis.ResponseError as error:
            if "WRONGTYPE" not in str(error):
                raise
            return 0
        return size

    def _purge(self, queue: str) -> int:
        purged: int = super()._purge(queue)
        return purged + (self.leases.purge(self._lists_of(queue)) if self._is_leased(queue) else 0)

    def _lists_of(self, queue: str) -> list[str]:
        return [self._q_for_pri(queue, step) for step in self.priority_steps]

    def close(self) -> None:
        if self.leased and self._in_poll:  # kombu would wait for a reply that may hold a message; ours holds none
            self._in_poll.disconnect()
            self._in_poll = None
        self._turn.close()
        self._rounds = None
        self._release_fetched()
        super().close()

    def _receive_one(self, subscriber: Any) -> Any:
        """Reads what was published, such as a control message. Nothing that anybody publishes may end the worker."""
        try:
            return super()._receive_one(subscriber)
        except (*self.connection_errors, OperationalError, Empty):
            raise
        except Exception as error:  # noqa: BLE001  # of a stranger's message
            logger.warning("a published message was dropped: %s", _shown(error))
            return None

    def _deliver_fanout_message(self, message: Any, exchange: str) -> Any:
        check_envelope(message)  # kombu inflates what calls itself compressed
        return super()._deliver_fanout_message(message, exchange)

    @property
    def hands_over(self) -> bool:
        """Whether a fetch goes on in later turns of the event loop."""
        return bool(self._fetched or self._rounds)

    # kombu's poller calls the two methods below around its wait for BRPOP; a leased channel waits for its doorbell.

    def _brpop_start(self, timeout: float | None = None) -> None:
        self._awaits_doorbell = self.leased
        if not self.leased:
            super()._brpop_start(timeout)
            return
        if not self.active_queues or self._is_refused():
            return
        connection = self.client.connection
        try:
            connection.send_command(*wait_command(self._q_for_pri(self.active_queues[0], 0)))
        except redis.ResponseError as error:  # it is asked how it is, now and then, before it gets a command
            self._was_refused(error)
            return
        self._in_poll = connection
        self._brpop_sent_at = time.monotonic()

    def _brpop_read(self, **options: Any) -> bool:
        if not self._awaits_doorbell:
            return bool(super()._brpop_read(**options))
        try:
            self.client.parse_response(self.client.connection, "BLMOVE")
        except self.connection_errors:
            self.client.connection.disconnect()
            raise
        except redis.ResponseError as error:
            return self._fetch_past(error)
        finally:
            self._in_poll = None
            self._flush_brpop_reauth()
        if not self.fetch():
            raise Empty
        return True

    def arm_doorbells(self, poller: DoorbellPoller) -> None:
        """Wait for every list but the first, for which kombu's poller waits, and for sorted messages."""
        if self._is_refused():
            return
        try:
            for queue in self.active_queues:
                for list_name in (*self._lists_of(queue), bell_key(queue)):
                    if list_name != self.active_queues[0]:
                        self._doorbell(list_name).arm(poller)
        except redis.ResponseError as error:
            self._was_refused(error)

    def arm_doorbells_of_better(self, poller: DoorbellPoller) -> None:
        """Without credit, wait for the lists whose messages would preempt what runs, if any would."""
        if self.hands_over or self._preemption_timer is not None or self._is_refused():
            return
        level, count = self.preemption_credit()
        if count <= 0:
            return
        try:
            for step in self.priority_steps:
                for queue in self.active_queues if step < level else ():
                    self._doorbell(self._q_for_pri(queue, step)).arm(poller)
        except redis.ResponseError as error:
            self._was_refused(error)

    def _doorbell(self, list_name: str) -> Doorbell:
        if list_name not in self._doorbells:
            self._doorbells[list_name] = Doorbell(self, list_name)
        return self._doorbells[list_name]

    def on_doorbell(self, doorbell: Doorbell) -> bool:
        """Fetches, as a list has a message or its wait is over. False if there was none."""
        try:
            has_message = doorbell.answer()
        except redis.ResponseError as error:
            return self._fetch_past(error)
        if self.fetch():
            return True
        if has_message:
            self.await_better()
        return False

    def await_left_better(self) -> None:
        """Before each wait: better messages that a fetch may have left, as its credit was used up, are next."""
        if self._better_credit <= 0 and self.active_queues and not (self.hands_over or self._is_refused()):
            self.await_better()

    def await_better(self) -> None:
        """Take better messages after the wait, if they would preempt anything then."""
        loop = self.connection.loop
        if loop is not None and self._preemption_timer is None and self.preemption_credit()[1] > 0:
            self._preemption_timer = loop.call_later(self.preemption_wait_seconds, self._on_preemption_time)

    def _on_preemption_time(self) -> None:
        self._preemption_timer = None
        if self.fetch():  # there was room by now
            self._better_credit = 0
        else:
            self.fetch_better()
        self.connection.cycle.look_soon()  # the doorbells were not armed meanwhile

    def _fetch_past(self, error: "redis.ResponseError") -> bool:
        """The server refuses to wait for one list. Other lists may have messages, where only its type is wrong."""
        fetched = "WRONGTYPE" in str(error) and self.fetch()
        self._was_refused(error)
        return fetched

    def _lists(self) -> list[str]:
        """The lists of all queues in the order in which they are served; the queues take turns."""
        queues = self._queue_cycle.consume(len(self.active_queues))
        return [self._q_for_pri(queue, step) for step in self.priority_steps for queue in queues]

    def fetch(self) -> bool:
        """Takes as many messages as there is credit for, and hands them to their consumers. False if there was none.

        What takes long goes on in later turns of the event loop.
        """
        if not self.leased or self._closing or not self.active_queues or self.hands_over or self._is_refused():
            return False
        count = self.credit()
        if count <= 0:
            return False
        self._rounds = self.leases.fetch_in_rounds(self._lists(), count)
        return self._go_on()

    def fetch_better(self) -> bool:
        """Without credit, take messages that preempt what runs. False where nothing may be preempted."""
        if not self.leased or self._closing or not self.active_queues or self.hands_over or self._is_refused():
            return False
        level, count = self.preemption_credit()
        if count <= 0:
            return False
        num_better = sum(step < level for step in self.priority_steps) * len(self.active_queues)
        self._better_credit = count
        self._rounds = self.leases.fetch_in_rounds(self._lists(), count, taken_from=num_better)
        self._go_on()
        return True

    def _go_on(self) -> bool:
        """Fetch and hand over for one turn of the event loop, and in the next ones; all at once where there is none."""
        loop = self.connection.loop
        until = time.monotonic() + _TURN_SECONDS if loop is not None else math.inf
        found = False
        try:
            while self.hands_over:
                if self._fetched:
                    found = True
                    self._hand_over_step()
                else:
                    self._fetch_round()
                if time.monotonic() >= until:
                    break
        except BaseException:
            self._rounds = None
            self._turn.end()
            self._release_fetched()
            raise
        if self.hands_over:
            self._turn.begin(loop, self._go_on)
        else:
            self._turn.end()
            self.connection.cycle.look_soon()
        return found or self.hands_over

    def _fetch_round(self) -> None:
        assert self._rounds is not None
        try:
            messages = next(self._rounds, None)
        except redis.ResponseError as error:
            messages = None
            self._was_refused(error)
        if messages is None:
            self._rounds = None
            if self._better_credit > 0:
                self._better_credit = math.inf
        else:
            self._fetched += messages
            self._better_credit -= sum(not message.over_quota for message in messages)

    def _hand_over_step(self) -> None:
        steps = self._steps = self._steps or self._hand_over()
        try:
            next(steps)
        except StopIteration:
            self._steps = None

    def _release_fetched(self) -> None:
        self._steps = None
        while self._fetched:  # the last first: they come out again in their order
            self.leases.release(self._fetched.pop().lease_id)

    def _is_refused(self) -> bool:
        return time.monotonic() < self._ask_again_at

    def _was_refused(self, error: "redis.ResponseError") -> None:
        """The server is there, but out of memory, read-only or strict: that passes, and must not end the worker."""
        self._ask_again_at = time.monotonic() + _REFUSED_SECONDS
        logger.warning("no messages are taken for %g s, as the server refuses: %s", _REFUSED_SECONDS, error)
        self.leases.on_refused(str(error))

    def _hand_over(self) -> Iterator[None]:
        """Hands the first message to its consumer, in steps. No message, whatever is in it, may end the worker."""
        message = self._fetched[0]
        queue = message.list_name.partition(self.sep)[0]
        payload: dict[str, Any] | None = None
        problem = ""
        try:
            payload = yield from self._payload(message, queue)
        except Exception as error:  # noqa: BLE001  # whatever a stranger put into the queue
            problem = _shown(error)
        self._fetched.popleft()  # not before: where the channel closes between two steps, it is released
        if payload is None:
            self.leases.bury(message.lease_id, DeadLetterReason.UNDECODABLE, problem)
            return
        consume = self.connection._callbacks.get(queue)
        if consume is None:  # the consumer was cancelled in the meantime
            self.leases.release(message.lease_id)
            return
        try:
            if not self.leases.bind(message, payload["headers"].get("id")):
                self.leases.bury(message.lease_id, DeadLetterReason.DUPLICATE_ID)
                return
            consume(payload)
        except (*CONNECTION_ERRORS, OperationalError):
            self.leases.release(message.lease_id, strike=True)
            raise
        except redis.ResponseError as error:
            self.leases.release(message.lease_id)
            self._was_refused(error)
        except Exception as error:  # noqa: BLE001  # one bad message must not end the worker
            # the error's own text may quote the message, and with it a prompt
            trace = "".join(traceback.format_tb(error.__traceback__))
            logger.error("a message of queue %s could not be delivered: %s\n%s", queue, type(error).__name__, trace)
            self.leases.bury(message.lease_id, DeadLetterReason.UNDELIVERABLE, type(error).__name__)

    def _payload(self, message: LeasedMessage, queue: str) -> Generator[None, None, dict[str, Any]]:
        """What kombu gets, made in steps of 26 ms at most, as measured with the largest message."""
        payload = open_envelope(message.body)
        yield
        content = content_digest(payload)
        yield
        properties = payload["properties"]
        # The tag that the producer chose may be anyone's; the lease's is unique among the messages in flight.
        properties["delivery_tag"] = message.lease_id
        properties["delivery_info"]["routing_key"] = queue
        properties["delivery_info"]["redelivered"] = message.deliveries > 1
        properties["delivery_info"][OVER_QUOTA] = message.over_quota
        properties["delivery_info"][CONTENT] = content
        properties["delivery_info"][QUEUED_AT] = None if message.waited is None else time.monotonic() - message.waited
        properties["delivery_info"] |= {
            STEP: level_of(message.list_name),
            PREEMPTIONS: message.preemptions,
        }
        # Decoded once, as it may be megabytes.
        payload["body"], properties["body_encoding"] = self.Message(payload, channel=self).body, None
        self.leases.had_prefix(payload["headers"].get("prefix"))
        yield
        return payload


def _shown(error: Exception) -> str:
    """What went wrong, without the text of errors that may quote the message."""
    return str(error) if isinstance(error, MalformedMessageError) else type(error).__name__


class Transport(kombu_redis.Transport):
    """Selected by `broker_transport='headrace_broker.transport:Transport'` with an ordinary redis:// URL."""

    Channel = Channel
    loop: Any = None
    """kombu's event loop, where one turns."""
    lease_registry: ClassVar[LeaseRegistry] = LeaseRegistry()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cycle = DoorbellPoller()

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        self.loop = loop
        # Renew before kombu reaps on this new connection, or the first to be reaped would be our own.
        for leases in {channel.leases for channel in self.channels}:
            self.lease_registry.keep_alive(leases, loop)
        self.cycle.read_by(self.on_readable, loop.readers)
        before = set(loop.on_tick)
        super().register_with_event_loop(connection, loop)
        for look in loop.on_tick - before:
            loop.on_tick.remove(look)
            loop.on_tick.add(partial(self.cycle.prepare, look))
