"""One seeded schedule of faults around one request, and whether the request survives it."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final
from unittest.mock import patch

import redis

from fleet.protocol_servers import QueueServer, StreamServer, Subscriber
from fleet.protocol_table import TableChanges
from fleet.protocol_worker import NUM_TOKENS, SimulatedWorker
from fleet.virtual_time import Actor, Network, VirtualTime
from headrace_broker.queue import leases as leases_module
from headrace_broker.queue.leases import SCRIPTS, Leases
from headrace_broker.scripts import LuaScript
from headrace_broker.streams import writer as writer_module
from headrace_broker.streams.events import ChunkEvent, EndEvent
from headrace_broker.streams.writer import StreamWriter

CALM_AT: Final = 120.0
"""Virtual seconds after which no fault happens any more."""
_ENDS_AT: Final = 600.0
_NUM_WORKERS: Final = 3
_NUM_FAULTS: Final = 4
_AWAY_SECONDS: Final = (1.0, 25.0)
_READ_SECONDS: Final = 0.3

_ACCEPT_ANY: Final = """do
      local last, attempt, tokens = tail(key)
      local mine, offset = split_id(id)
      if not last then
        outcome = 'gone'
      elseif tokens >= offset or field(last, 'type') == 'end' then
        outcome = false
      else
        id = string.format('%.0f-%.0f', math.max(attempt, mine), offset)
      end
    end"""
"""The stream server takes every entry with more tokens than the stream has, whichever attempt wrote it."""


@dataclass(frozen=True, slots=True)
class Variant:
    """The protocol, or one with a fault that the simulation must find."""

    about: str
    ungranted_workers: int = 0
    """So many workers claim by the rule of an earlier version."""
    counts_no_grants: bool = False
    """The workers without grants do not count their leases either, as in an earlier version."""
    reads_table: bool = False
    """The workers write to the home by their own table of stream servers."""
    publishing: Mapping[str, str] = field(default_factory=dict)
    """Replacements in the script that publishes."""


VARIANTS: Final = {
    "protocol": Variant("claims have the number of the lease"),
    "upgrade": Variant("one of three workers is of an earlier version", 1, counts_no_grants=True),
    "unfenced": Variant(
        "the stream server accepts any entry",
        publishing={"outcome = verdict(key, id, before, kind, data)": _ACCEPT_ANY},
    ),
    "no-grant": Variant("the attempt follows the last one", _NUM_WORKERS),
    "own-table": Variant("workers compute homes by the table of their start", reads_table=True),
}
MUTATIONS: Final = ("unfenced", "no-grant", "own-table")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a schedule did to the request."""

    is_broken: bool
    """The subscriber did not get every token once and in order, and then one end."""
    is_unfinished: bool
    """The message was not acknowledged in time, or a result differs from the stream."""
    is_owner_fenced: bool
    """The holder of the lease was fenced by the late claim of an earlier lease."""
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def is_good(self) -> bool:
        return not (self.is_broken or self.is_unfinished or self.is_owner_fenced)


def run_schedule(seed: int, variant: Variant, queue_client: "redis.Redis", *clients: "redis.Redis") -> Outcome:
    """Run one schedule on empty servers. Equal seeds give equal schedules.

    Args:
        clients: of the stream servers.
    """
    random, time = Random(seed), VirtualTime()
    network = Network(time, random, CALM_AT)
    queue = QueueServer(queue_client, time)
    # the names decide the home, so it is another server in another schedule
    by_name = {f"s{number}-{seed}": client for number, client in enumerate(clients)}
    streams = {name: StreamServer(client) for name, client in by_name.items()}
    table = TableChanges(queue_client, by_name, time, random, CALM_AT)
    subscriber = Subscriber(streams.values(), time)
    with _changed(writer_module, "_PUBLISH", variant.publishing):
        writers = {name: StreamWriter(client, 3600) for name, client in by_name.items()}

    def make_earlier_leases() -> Leases:
        with _counting_no_grants():
            return queue.make_leases()

    workers = []
    for number in range(_NUM_WORKERS):
        uses_grants = number >= variant.ungranted_workers
        make_leases = queue.make_leases if uses_grants or not variant.counts_no_grants else make_earlier_leases
        parts = (f"w{number}", time, random, network, queue, streams, writers, make_leases)
        workers.append(SimulatedWorker(*parts, uses_grants=uses_grants, reads_table=variant.reads_table))
        time.start(workers[-1].run(), random.random())
    time.start(queue.reap())
    time.start(_subscribe(queue, subscriber))
    time.start(_take_servers_away(time, random, (queue, *streams.values())))
    time.start(table.run())
    time.run(_ENDS_AT)
    for server in streams.values():
        server.away_until = 0.0  # a request may be done while its stream is away
    subscriber.read_new()
    return _outcome(queue, subscriber, workers, network.counts + table.counts)


def _subscribe(queue: QueueServer, subscriber: Subscriber) -> Actor:
    while not queue.is_done:
        subscriber.read_new()
        yield _READ_SECONDS


def _take_servers_away(time: VirtualTime, random: Random, servers: Sequence[QueueServer | StreamServer]) -> Actor:
    for _ in range(_NUM_FAULTS):
        yield random.uniform(1.0, 2 * CALM_AT / _NUM_FAULTS)
        if time.now < CALM_AT:
            random.choice(servers).away_until = min(CALM_AT, time.now + random.uniform(*_AWAY_SECONDS))


def _outcome(
    queue: QueueServer, subscriber: Subscriber, workers: list[SimulatedWorker], counts: Counter[str]
) -> Outcome:
    received: list[int | str] = []
    for event in subscriber.read:
        if isinstance(event, ChunkEvent):
            received += event.token_ids
        elif isinstance(event, EndEvent):
            received.append("end")
    results = [result for worker in workers for result in worker.results]
    counts = sum((worker.counts for worker in workers), counts)
    return Outcome(
        is_broken=received != [*range(1, NUM_TOKENS + 1), "end"],
        is_unfinished=not queue.is_done or not results or set(results) != {NUM_TOKENS},
        is_owner_fenced=counts["owners fenced"] > 0,
        counts=counts,
    )


@contextmanager
def _counting_no_grants() -> Iterator[None]:
    changes = {
        "count_grant(record)\n  charge(": "charge(",
        "record.choices or 1, record.grant,": "record.choices or 1, 0,",
    }
    with patch.dict(leases_module.SCRIPTS, {"fetch": _replaced(SCRIPTS["fetch"], changes)}):
        yield


@contextmanager
def _changed(module: object, name: str, changes: Mapping[str, str]) -> Iterator[None]:
    with ExitStack() as stack:
        if changes:
            stack.enter_context(patch.object(module, name, _replaced(getattr(module, name), changes)))
        yield


def _replaced(script: LuaScript, changes: Mapping[str, str]) -> LuaScript:
    """Return the script with these texts replaced. Each must occur once, or the fault would not be there."""
    text = script.text
    for old, new in changes.items():
        assert text.count(old) == 1, f"the script has {old!r} {text.count(old)} times"
        text = text.replace(old, new)
    return replace(script, text=text)
