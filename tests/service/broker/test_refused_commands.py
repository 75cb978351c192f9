"""A user loses the right to a command, or to write a key, while messages flow: none is lost, doubled or counted."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

import pytest
import redis

from headrace_broker.keys import (
    KEYS,
    deputy_key,
    ended_key,
    lease_bodies_key,
    lease_deliveries_key,
    leases_key,
    queue_lists,
    reaper_key,
    sorted_ids_key,
    stream_key,
    tenant_ids_key,
)
from headrace_broker.queue.dead_letters import dead_letters
from headrace_broker.queue.fair_share import FairShare
from headrace_broker.queue.leased_message import LeasedMessage
from headrace_broker.queue.leases import SCRIPTS, Leases
from headrace_broker.results import Usage
from headrace_broker.server.connections import REDIS_ERRORS, connect
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.streams.writer import StreamWrite, StreamWriter
from headrace_wire.codes import DeadLetterReason
from service.broker.tenant_messages import LISTS, QUEUE, envelope, name_of, push
from service.redis_users import url_of

LIMIT: Final = 5
OTHER: Final = "headrace.other"
OTHER_LISTS: Final = queue_lists(OTHER)
COMMANDS: Final = sorted(
    {command for script in SCRIPTS.values() for command in re.findall(r"redis\.p?call\('(\w+)'", script.text)}
)
"""Every command of every script that moves messages."""
_PARTS: Final = r"headrace(\.|:dead|:lease|:queue|:share|:usage|:budget|:tenant-requests)"
OF_MESSAGES: Final = [key for key in KEYS if re.match(_PARTS, key.pattern) and key.name not in ("reaper", "deputy")]


class Flow:
    """Messages in every phase, and a worker that takes each of them one step further."""

    def __init__(self, admin: "redis.Redis", user: "redis.Redis") -> None:
        self.admin = admin
        self.leases = self.make_leases(user)
        self.leases.serve(QUEUE)
        self.refused = 0
        self.done: Counter[str] = Counter()
        self.deliveries: dict[str, int] = {}
        push(admin, "a", ["acked", "requeued", "preempted", "postponed", "dead", "bound", "lost", "delayed"])
        self.held = {name_of(message): message for message in self.leases.fetch(LISTS, 8)}
        for name, message in self.held.items():
            if name != "lost":
                self.leases.hold(message.lease_id, message)
        self.leases.postpone(self.held["delayed"].lease_id, 0)
        admin.zadd(leases_key(QUEUE), {self.held["lost"].lease_id: 1})
        push(admin, "b", ["sorted"])
        push(admin, "c", ["worn"])
        push(admin, "c", ["aged"], step=2)
        admin.lpush(OTHER_LISTS[0], envelope("purged"))
        self.leases.sort(LISTS)
        self.leases.sort(OTHER_LISTS)
        (worn,) = (key for key, body in admin.hgetall(lease_bodies_key(QUEUE)).items() if b'"worn"' in body)
        admin.hset(lease_deliveries_key(QUEUE), worn, LIMIT)
        admin.lpush(LISTS[0], envelope("sorted", "b"))  # a copy
        push(admin, "d", ["new 1", "new 2"])
        push(admin, "greedy", ["quota 1", "quota 2", "quota 3"])

    def make_leases(self, client: "redis.Redis") -> Leases:
        policy = FairShare(quota=2, ageing_seconds=1e-6)
        return Leases(client, lease_seconds=60, delivery_limit=LIMIT, fair_share=policy)

    def step(self) -> None:
        """Run every script of the worker once."""
        leases, ids = self.leases, {name: message.lease_id for name, message in self.held.items()}
        leases.tick()
        leases.ack(ids["acked"])
        leases.requeue(ids["requeued"])
        leases.requeue(ids["preempted"], is_preempted=True)
        leases.postpone(ids["postponed"], 1000)
        leases.dead_letter(ids["dead"], DeadLetterReason.REJECTED)
        self._try(lambda: leases.bind(self.held["bound"], "an id"))
        self._try(leases.reap)
        self._try(lambda: leases.purge(OTHER_LISTS))
        self._try(lambda: leases.sort(LISTS))
        self._try(lambda: self._settle(leases, leases.fetch(LISTS, 2)))
        self._try(lambda: self._settle(leases, leases.take_delayed(LISTS, 1)))
        self.refused += len(leases._pending)

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except REDIS_ERRORS:
            self.refused += 1

    def _settle(self, leases: Leases, messages: list[LeasedMessage]) -> None:
        for message in messages:
            leases.hold(message.lease_id, message)
            leases.ack(message.lease_id)
            self.done[name_of(message)] += 1
            self.deliveries[name_of(message)] = message.deliveries

    def finish(self) -> None:
        """Settle all messages by a worker with all rights."""
        self.leases.tick()
        self.leases.ack(self.held["bound"].lease_id)
        self.done.update(["acked", "bound"])
        other = self.make_leases(self.admin)
        for lease_id in self.admin.zrange(leases_key(QUEUE), 0, -1):  # delayed, lost, or leased by a script that failed
            self.admin.zadd(leases_key(QUEUE), {lease_id: 1})
        other.reap(QUEUE, OTHER)
        while messages := other.fetch(LISTS, 100):
            self._settle(other, messages)
        other.purge(OTHER_LISTS)
        self.admin.delete(reaper_key(QUEUE), deputy_key(QUEUE))  # they expire soon


@pytest.fixture
def limited(redis_server: EmbeddedServer, redis_client: "redis.Redis") -> Iterator["redis.Redis"]:
    redis_client.acl_setuser("limited", enabled=True, passwords=["+secret"], keys=["*"], commands=["+@all"])
    with connect(url_of(redis_server, "limited")) as client:
        yield client
    redis_client.acl_deluser("limited")


SENT: Final = {
    *("acked", "requeued", "preempted", "postponed", "bound", "lost", "delayed", "sorted", "aged", "new 1", "new 2"),
    *("quota 1", "quota 2", "quota 3"),
}


def without(name: str) -> list[str]:
    """Return the rules of a user who may only read the keys of this declaration."""
    patterns = {key.name: re.sub("<[^>]*>", "*", key.pattern) for key in KEYS}
    wider = [p for p in patterns.values() if p.endswith("*") and patterns[name].startswith(p.removesuffix("*"))]
    rest = [f"~{pattern}" for pattern in patterns.values() if pattern not in wider and pattern != patterns[name]]
    return ["resetkeys", *rest, f"%R~{patterns[name]}"]


@pytest.mark.parametrize(
    "rules",
    [
        *(pytest.param([f"-{command.lower()}"], id=command) for command in COMMANDS),
        *(pytest.param(without(key.name), id=key.name) for key in OF_MESSAGES),
    ],
)
def test_a_missing_right_loses_doubles_and_counts_no_message(
    redis_client: "redis.Redis", limited: "redis.Redis", rules: list[str]
) -> None:
    flow = Flow(redis_client, limited)
    redis_client.execute_command("ACL", "SETUSER", "limited", *rules)
    flow.step()
    redis_client.execute_command("ACL", "SETUSER", "limited", "+@all", "resetkeys", "~*")
    assert flow.refused
    flow.finish()
    assert flow.done == Counter(SENT)
    assert {name: count for name, count in flow.deliveries.items() if count > 1} == {"lost": 2}
    letters = Counter((letter.reason, json.loads(letter.body)["body"]) for letter in dead_letters(redis_client, QUEUE))
    assert letters == Counter([("rejected", "dead"), ("delivery limit", "worn"), ("duplicate", "sorted")])
    assert [key for part in ("lease:*", "queue:*") for key in redis_client.keys(f"headrace:{part}")] == []
    assert redis_client.keys("headrace.*") == []


@pytest.mark.parametrize("command", ["del", "expire", "set", "xadd", "xrange", "xrevrange"])
def test_a_stream_is_whole_once_a_refused_call_is_repeated(
    redis_client: "redis.Redis", limited: "redis.Redis", command: str
) -> None:
    writer = StreamWriter(limited, 600)
    calls: list[Callable[[], object]] = [
        lambda: writer.claim("run", "w"),
        lambda: writer.publish([StreamWrite.chunk("run", 1, 1, index=0, token_ids=[1], text="a")]),
        lambda: writer.publish([StreamWrite.end("run", 1, 1, finish_reason="stop", usage=Usage(1, 0, 1))]),
        lambda: writer.end_unclaimed("ended", "cancelled", None),
    ]
    for call in calls:
        redis_client.execute_command("ACL", "SETUSER", "limited", f"-{command}")
        try:
            call()
        except redis.ResponseError:
            redis_client.execute_command("ACL", "SETUSER", "limited", "+@all")
            call()
    kinds = [fields[b"type"] for _, fields in redis_client.xrange(stream_key("run"))]
    assert kinds == [b"start", b"chunk", b"end"]
    assert len(redis_client.xrange(stream_key("ended"))) == 1
    for name in ("run", "ended"):
        assert redis_client.ttl(stream_key(name)) > 0
        assert redis_client.ttl(ended_key(name)) > 0


def test_messages_that_nothing_names_are_requeued_a_few_at_a_time(
    redis_client: "redis.Redis", make_leases: Callable[..., Leases]
) -> None:
    leases = make_leases()
    push(redis_client, "a", [f"{number}" for number in range(300)])
    leases.sort(LISTS)
    ids = redis_client.zrange(sorted_ids_key(LISTS[0]), 0, -1)
    redis_client.zrem(sorted_ids_key(LISTS[0]), *ids[:5])
    redis_client.zrem(tenant_ids_key(LISTS[0], "a"), *ids[:5])
    while redis_client.zcard(sorted_ids_key(LISTS[0])) < 300:
        assert leases.reap(QUEUE) == 0
    assert [name_of(message) for message in leases.fetch(LISTS, 300)] == [str(number) for number in range(300)]
