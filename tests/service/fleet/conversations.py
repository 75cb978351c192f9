"""Messages of conversations, and a fleet of workers that take them, on a real server and in virtual time."""

import heapq
from collections.abc import Callable
from random import Random
from typing import Any

import msgpack
import redis

from headrace_broker.keys import holder_wake_up_key, lease_records_key, wake_up_key
from headrace_broker.queue.fair_share import FairShare
from headrace_broker.queue.leased_message import LeasedMessage
from headrace_broker.queue.leases import Leases
from service.broker.tenant_messages import LISTS, QUEUE, envelope, name_of, tenant_of

FOR_EVER = 3600.0
"""A grace that does not end within a test, however slow the machine is."""
SYSTEM = "system"
"""The prefix that all conversations have in common."""


def turn(session: str, number: int, tenant: str = "a", **headers: Any) -> str:
    """Return the message of a conversation's turn, counted from 0. It names its conversations as our client does."""
    continues = {"continues": f"{session}.{number - 1}"} if number else {}
    headers = {"prefix": SYSTEM, "conversation": f"{session}.{number}", **continues, **headers}
    return envelope(f"{session}.{number}", tenant, **headers)


def send(client: "redis.Redis", *messages: str) -> None:
    client.lpush(LISTS[0], *messages)


def make_leases(client: "redis.Redis", grace: float = FOR_EVER, **options: Any) -> Leases:
    """Make one worker's leases. They outlast any test."""
    policy = {"prefix_affinity": True, "prefix_grace": grace, **options.pop("policy", {})}
    return Leases(client, lease_seconds=600, delivery_limit=5, fair_share=FairShare(**policy), **options)


def end_grace(client: "redis.Redis", graces: float = 2.0, conversation: str | None = None) -> None:
    """Change the keys as if all messages, or that of one conversation, had been sorted so many graces earlier."""
    for lease_id, packed in client.hgetall(lease_records_key(QUEUE)).items():
        record = msgpack.unpackb(packed)
        if conversation not in (None, record.get("conversation")):
            continue
        record["sorted"] -= int(graces * FOR_EVER * 1e6)
        client.hset(lease_records_key(QUEUE), lease_id, msgpack.packb(record))


class VirtualWorker:
    """A worker whose requests end in virtual time."""

    def __init__(self, leases: Leases, slots: int) -> None:
        self.leases, self.free = leases, slots
        self.served: set[str] = set()
        """Conversations of which it has taken a request."""


class VirtualFleet:
    """Workers that wait in Redis. A message wakes the one that waits for the longest time, and each token one more.

    Args:
        grace: the prefix grace of all workers.
    """

    def __init__(self, client: "redis.Redis", num_workers: int, slots: int, grace: float) -> None:
        self.client = client
        self._now = 0.0
        make = [make_leases(client, grace, clock=lambda: self._now) for _ in range(num_workers)]
        self.workers = [VirtualWorker(leases, slots) for leases in make]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self.follow_ups = self.hits = self.fetches = 0
        self.sent_at: dict[str, float] = {}
        self.waits: dict[str, list[float]] = {}
        """By tenant: the virtual seconds for which each message waited, with 0 if the first woken worker took it."""

    def at(self, seconds: float, do: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (seconds, self._num_events, do))

    def run(self) -> None:
        while self._events:
            self._now, _, do = heapq.heappop(self._events)
            do()

    def send(self, message: str, name: str) -> None:
        self.sent_at[name] = self._now
        send(self.client, message)
        waiting = [worker for worker in self.workers if worker.free]
        for worker in waiting:
            worker.leases.slots._tell_from.clear()  # else its free slots would be forgotten if the test is slow
            worker.leases.slots.tell(QUEUE, worker.free)
        if waiting:
            self._fetch(waiting[0])
        self._answer_tokens()

    def _answer_tokens(self) -> None:
        """Let the tokens wake workers until none is left that any of them waits for."""
        woken = True
        while woken:
            woken = False
            for worker in [worker for worker in self.workers if worker.free]:
                for token in (holder_wake_up_key(QUEUE, worker.leases.owner), wake_up_key(QUEUE)):
                    if worker.free and self.client.lpop(token) is not None:
                        self._fetch(worker)
                        woken = True

    def _fetch(self, worker: VirtualWorker) -> None:
        self.fetches += 1
        self.workers.remove(worker)  # its next wait is the newest
        self.workers.append(worker)
        for message in worker.leases.fetch(LISTS, min(4, worker.free)):
            self._begin(worker, message)

    def _begin(self, worker: VirtualWorker, message: LeasedMessage) -> None:
        worker.free -= 1
        name = name_of(message)
        session, _, number = name.partition(".")
        if int(number):
            self.follow_ups += 1
            self.hits += session in worker.served
        worker.served.add(session)
        self.waits.setdefault(tenant_of(message), []).append(self._now - self.sent_at[name])
        seconds = Random(name).expovariate(1 / SERVICE_SECONDS)  # the same on each worker
        self.at(self._now + seconds, lambda: self._end(worker, message))

    def _end(self, worker: VirtualWorker, message: LeasedMessage) -> None:
        worker.leases.hold(message.lease_id, message)
        worker.leases.ack(message.lease_id)
        worker.free += 1
        worker.leases.slots.tell(QUEUE, worker.free)
        self._answer_tokens()


SERVICE_SECONDS = 6.0
THINK_SECONDS = 30.0


def run_sessions(fleet: VirtualFleet, *, load: float, slots: int, sessions: int, turns: int) -> None:
    """Send the conversations of tenant a, and one request of tenant b for each of their turns on average in ten."""
    random = Random(2)
    rate = load * slots / SERVICE_SECONDS / turns
    at = 0.0

    def send_at(seconds: float, name: str, message: str) -> None:
        fleet.at(seconds, lambda: fleet.send(message, name))

    for session in range(sessions):
        at += random.expovariate(rate)
        sent = at
        for number in range(turns):
            name = f"s{session}"
            send_at(sent, f"{name}.{number}", turn(name, number))
            if random.random() < 0.1:
                single = f"b{session}x{number}"
                send_at(sent + random.random(), f"{single}.0", turn(single, 0, "b"))
            sent += SERVICE_SECONDS * 4 + random.expovariate(1 / THINK_SECONDS)
    fleet.run()
