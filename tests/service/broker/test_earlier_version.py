"""Workers of this version take over what workers of an earlier version have sorted, while both run."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import redis
from kombu import Connection

from headrace_broker.keys import dead_letters_key, delayed_key, queue_of
from headrace_broker.queue.dead_letters import dead_letters
from headrace_broker.queue.earlier_version import move_queue
from headrace_broker.queue.leases import Leases
from headrace_broker.queue.purge import PurgedMessages, purge_queue
from headrace_broker.queue.transport import Transport
from headrace_broker.server.embedded import EmbeddedServer
from service.broker.tenant_messages import LISTS, QUEUE, envelope, name_of
from service.earlier_code import EarlierCode, extract

COMMIT = "e86c438f"
"""The last one whose queues share their keys."""
QUEUED, LEASED, DELAYED, DEAD = 10_000, 64, 100, 10

WORKER = """
import json, sys
from headrace_broker.queue.leases import Leases
from headrace_broker.server.connections import connect
from headrace_wire.codes import DeadLetterReason

queue, url, *lists = sys.argv[1:]
client = connect(url)
leases = Leases(client, lease_seconds=3, delivery_limit=5)
name_of = lambda message: json.loads(message.body)["body"]
held = []
for line in sys.stdin:
    command, count = line.split()
    served = []
    if command == "sort":
        while client.llen(queue):
            leases.sort(lists)
    elif command == "reap":
        leases.tick()
        leases.reap()
    else:
        for message in leases.fetch(lists, int(count)):
            served.append(name_of(message))
            if command == "hold":
                leases.hold(message.lease_id, message)
                held.append(message)
            elif command == "delay":
                leases.postpone(message.lease_id, 3600)
            elif command == "kill":
                leases.dead_letter(message.lease_id, DeadLetterReason.POISON, "x")
            elif command == "retry":
                leases.requeue(message.lease_id, is_counted=True)
            elif command == "serve":
                leases.ack(message.lease_id)
        leases.tick()
    if command == "finish":
        served = [name_of(message) for message in held[:int(count)]]
        for message in held[:int(count)]:
            leases.ack(message.lease_id)
    print(json.dumps(served), flush=True)
"""


class EarlierWorker:
    """A process that runs the earlier version's code for leases."""

    def __init__(self, url: str, folder: Path) -> None:
        command = [sys.executable, "-c", WORKER, QUEUE, url, *LISTS]
        self.process = subprocess.Popen(
            command,
            env=EarlierCode(folder).added_to(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, command: str, count: int = 0) -> list[str]:
        """Run a command and return the names of the messages that it took or finished."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{command} {count}\n")
        self.process.stdin.flush()
        names: list[str] = json.loads(self.process.stdout.readline())
        return names

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def earlier(redis_server: EmbeddedServer, tmp_path: Path) -> Iterator[EarlierWorker]:
    if not extract(COMMIT, tmp_path):
        pytest.skip(f"the history of git has no commit {COMMIT}")
    worker = EarlierWorker(redis_server.url, tmp_path)
    yield worker
    worker.kill()


def earlier_keys(client: "redis.Redis") -> list[str]:
    """Return the keys that only the earlier version has."""
    keys = [key.decode() for key in client.keys("headrace:*")]
    return [
        key
        for key in keys
        if key.startswith(("headrace:ready:", "headrace:lease:leases:held:", "headrace:lease:leases:delayed:"))
        or (key.startswith(("headrace:lease:", "headrace:dead")) and QUEUE not in queue_of(key))
    ]


def test_no_message_is_lost_or_doubled_while_workers_of_both_versions_run(
    earlier: EarlierWorker, redis_client: "redis.Redis"
) -> None:
    total = QUEUED + LEASED + DELAYED + DEAD
    bodies = [envelope(f"{number}", f"tenant {number % 7}", id=f"id {number}") for number in range(total)]
    redis_client.lpush(QUEUE, *bodies)
    earlier.run("sort")
    held = earlier.run("hold", LEASED)
    delayed, dead, retried = earlier.run("delay", DELAYED), earlier.run("kill", DEAD), earlier.run("retry", 5)
    redis_client.lpush("headrace:ready:arrived:" + QUEUE, envelope("arrived", id="arrived"))
    before = dict(redis_client.zrange(f"headrace:lease:leases:delayed:{QUEUE}", 0, -1, withscores=True))
    assert (len(held), len(delayed), len(dead), len(before)) == (LEASED, DELAYED, DEAD, DELAYED)

    leases = Leases(redis_client, lease_seconds=60, delivery_limit=5)
    leases.serve(QUEUE)
    done: Counter[str] = Counter()
    by_earlier = 0
    deliveries: dict[str, int] = {}

    deadline = time.monotonic() + 240

    def serve(count: int) -> None:
        assert time.monotonic() < deadline, f"{done.total()} messages were served"
        for message in leases.fetch(LISTS, count):
            leases.ack(message.lease_id)
            done[name_of(message)] += 1
            deliveries[name_of(message)] = message.deliveries

    number = 0
    while done.total() < QUEUED + 1:
        leases.reap()
        serve(20)
        taken = earlier.run("serve", 4)
        done.update(taken)
        by_earlier += len(taken)
        number += 1
        redis_client.lpush(QUEUE, envelope(f"new {number}", id=f"new {number}"))
        if number % 10 == 0:
            earlier.run("reap")
    assert by_earlier > 0
    assert {deliveries[name] for name in retried if name in deliveries} <= {2}

    # A worker of the earlier version finishes what it holds. If it dies, its messages come again.
    finished = earlier.run("finish", 32)
    done.update(finished)
    earlier.kill()
    while done.total() < QUEUED + 1 + number + LEASED:
        leases.reap()
        serve(100)
    assert {deliveries[name] for name in set(held) - set(finished)} == {2}

    after: list[tuple[Any, float]] = redis_client.zrange(delayed_key(QUEUE), 0, -1, withscores=True)
    assert sorted(due for _, due in after) == sorted(before.values())
    for message in leases.take_delayed(LISTS, DELAYED):
        leases.ack(message.lease_id)
        done[name_of(message)] += 1
    letters = dead_letters(redis_client, QUEUE)
    assert sorted(json.loads(letter.body)["body"] for letter in letters) == sorted(dead)
    assert done.keys() == {*map(str, range(total)), "arrived", *(f"new {one + 1}" for one in range(number))} - set(dead)
    assert set(done.values()) == {1}
    while keys := earlier_keys(redis_client):
        assert time.monotonic() < deadline, keys
        leases.reap()


def test_the_newest_dead_letters_of_both_versions_stay(redis_client: "redis.Redis") -> None:
    letters = [msgpack.packb({"list": QUEUE, "number": number}) for number in range(1003)]
    redis_client.lpush("headrace:dead", *letters[:1000])
    redis_client.lpush(dead_letters_key(QUEUE), *letters[1000:])
    while move_queue(redis_client, QUEUE):
        pass
    assert redis_client.lrange(dead_letters_key(QUEUE), 0, -1) == letters[:2:-1]
    assert not redis_client.exists("headrace:dead")


def test_a_message_that_was_sent_again_keeps_its_new_count_of_deliveries(redis_client: "redis.Redis") -> None:
    leases, body = Leases(redis_client, lease_seconds=60, delivery_limit=9), envelope("again")
    redis_client.lpush(QUEUE, body)
    for _ in range(2):
        leases.requeue(leases.fetch(LISTS, 1)[0].lease_id, is_counted=True)
    redis_client.hset("headrace:lease:body", "old", body)
    redis_client.hset("headrace:lease:deliveries", "old", 7)
    redis_client.zadd(f"headrace:ready:ids:{QUEUE}", {"old": 1})
    assert move_queue(redis_client, QUEUE)
    assert not earlier_keys(redis_client)
    assert [message.deliveries for message in leases.fetch(LISTS, 9)] == [3]


def test_the_wake_up_and_the_holders_of_an_empty_queue_are_deleted(redis_client: "redis.Redis") -> None:
    redis_client.lpush(f"headrace:ready:bell:{QUEUE}", "1")
    redis_client.hset(f"headrace:ready:holders:{QUEUE}", "conversation", "worker 1")
    redis_client.hset("headrace:lease:body", "of another queue", "x")
    move_queue(redis_client, QUEUE)
    assert len(earlier_keys(redis_client)) == 3
    redis_client.delete("headrace:lease:body")
    move_queue(redis_client, QUEUE)
    assert not earlier_keys(redis_client)


def test_a_refused_move_is_reported_again_within_seconds(redis_client: "redis.Redis") -> None:
    now, reports = 0.0, list[str]()
    leases = Leases(redis_client, lease_seconds=60, delivery_limit=9, clock=lambda: now)
    leases.on_refused = reports.append
    leases.serve(QUEUE)
    redis_client.set("headrace:lease:body", "not a hash")
    for _ in range(10):
        leases.reap()
        now += 1.0
    assert len(reports) >= 5


def test_a_purge_ends_what_workers_of_an_earlier_version_have_sorted(
    earlier: EarlierWorker, redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    redis_client.lpush(QUEUE, *(envelope(f"{number}", id=f"id {number}") for number in range(500)))
    earlier.run("sort")
    assert len(earlier.run("delay", 30)) == 30
    assert purge_queue(redis_client, QUEUE, ttl_seconds=60) == PurgedMessages(waiting=470, delayed=30)
    redis_client.lpush(QUEUE, *(envelope(f"{number}", id=f"id {number}") for number in range(500)))
    earlier.run("sort")
    with Connection(redis_server.url, transport=Transport) as connection:
        assert connection.channel().queue_purge(QUEUE) == 500
