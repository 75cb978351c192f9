"""`headrace erase` with the rights of the user operator, and with queues and streams on servers of their own."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click.testing
import msgpack
import pytest
import redis

from headrace_broker.keys import (
    holders_key,
    lease_records_key,
    result_key,
    stream_key,
    tenant_requests_key,
    usage_key,
)
from headrace_broker.packing import pack
from headrace_broker.queue.leases import Leases
from headrace_broker.results import Usage
from headrace_broker.server.connections import connect
from headrace_broker.streams.writer import StreamWriter
from headrace_broker.usage.entry import UsageEntry
from headrace_cli.commands.erase import erase
from headrace_cli.erase import eraser
from headrace_cli.erase.tenant_scan import Trace
from headrace_gateway.keys.key_file import new_key
from headrace_gateway.redis.keys import rate_key
from service.broker.tenant_messages import LISTS, QUEUE, envelope, take
from service.redis_users import ServerWithUsers, url_of
from service.servers import make_server


@pytest.fixture
def main(tmp_path: Path) -> Iterator[ServerWithUsers]:
    with ServerWithUsers(tmp_path) as server:
        yield server


def end_request(queue: "redis.Redis", streams: "redis.Redis", results: "redis.Redis", request_id: str) -> None:
    """Leave what a worker leaves of a request of the tenant acme."""
    leases = Leases(queue, lease_seconds=60, delivery_limit=5, usage_days=9, result_seconds=600)
    queue.lpush(LISTS[0], envelope(request_id, "acme", id=request_id))
    (message,) = take(leases)
    StreamWriter(streams, 600).claim(request_id, "w")
    results.set(result_key(request_id), "secret", ex=600)
    leases.cost(message.lease_id, 3, UsageEntry("completions", "web", Usage(1, 0, 2)))
    leases.ack(message.lease_id)


def run(url: str, *options: str, **environ: str) -> dict[str, Any]:
    environ = {"HEADRACE_REDIS_URL": url, **environ}
    outcome = click.testing.CliRunner().invoke(erase, ["--tenant", "acme", "--json", "--yes", *options], env=environ)
    assert outcome.exit_code == 0, outcome.output
    return dict(json.loads(outcome.stdout))


def test_the_operator_may_erase(main: ServerWithUsers) -> None:
    with connect(url_of(main, "worker")) as worker:
        end_request(worker, worker, worker, "r1")
        told = run(url_of(main, "operator"))
        assert told["left"] == []
        assert told["removed"]["streams"] == told["removed"]["results"] == 1
        assert not worker.exists(stream_key("r1"), result_key("r1"), tenant_requests_key("acme"))


def test_queues_and_streams_of_other_servers_are_erased(main: ServerWithUsers) -> None:
    with (
        make_server() as second,
        make_server() as third,
        connect(url_of(main, "admin")) as first,
        connect(second.url) as queue,
        connect(third.url) as streams,
    ):
        end_request(queue, streams, first, "r1")
        elsewhere = {"HEADRACE_QUEUE_URLS": f"m={second.url}", "HEADRACE_STREAM_URLS": f"s1={third.url}"}
        assert run(url_of(main, "operator"), **elsewhere)["left"] == []
        assert not first.exists(result_key("r1"))
        assert not queue.exists(tenant_requests_key("acme"))
        assert not [key for key in queue.scan_iter("headrace:usage:*") if b"acme" in repr(queue.hkeys(key)).encode()]
        assert not streams.exists(stream_key("r1"))


@pytest.mark.parametrize("num_removed", [0, 1, 2, 3])
def test_a_run_that_died_midway_can_be_repeated(
    main: ServerWithUsers, monkeypatch: pytest.MonkeyPatch, num_removed: int
) -> None:
    remove, removed = eraser._remove, []

    def die_later(trace: Trace) -> int:
        if len(removed) == num_removed:
            raise KeyboardInterrupt
        removed.append(trace)
        return remove(trace)

    with connect(url_of(main, "worker")) as worker:
        end_request(worker, worker, worker, "r1")
        with monkeypatch.context() as patched:
            patched.setattr(eraser, "_remove", die_later)
            died = click.testing.CliRunner().invoke(
                erase, ["--tenant", "acme", "--yes"], env={"HEADRACE_REDIS_URL": url_of(main, "operator")}
            )
            assert died.exit_code == 1
        assert run(url_of(main, "operator"))["left"] == []
        assert not worker.exists(stream_key("r1"), result_key("r1"), tenant_requests_key("acme"))


def test_limits_of_a_key_of_another_tenant_stay(main: ServerWithUsers, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{new_key('web', tenant='beta')[1]}\n{new_key('own', tenant='acme')[1]}\n")
    with connect(url_of(main, "admin")) as client:
        end_request(client, client, client, "r1")  # a producer of acme wrote the name of a key of beta
        for name in ("web", "own", "gone"):
            client.hset(rate_key(name), "requests", "1 1")
        run(url_of(main, "operator"))  # without the file nobody knows whose the keys are
        assert client.exists(rate_key("web"), rate_key("own"), rate_key("gone")) == 3
        run(url_of(main, "operator"), "--keys", str(file), "--key", "web", "--key", "gone")
        assert client.exists(rate_key("web"))
        assert not client.exists(rate_key("own"), rate_key("gone"))


def test_keys_that_were_edited_by_hand_do_not_stop_the_command(main: ServerWithUsers) -> None:
    with connect(url_of(main, "admin")) as client:
        end_request(client, client, client, "r1")
        (bucket,) = client.scan_iter("headrace:usage:*")
        (row,) = client.hkeys(bucket)
        client.hset(bucket, row, "by hand")
        for name in (usage_key(0), holders_key(QUEUE), lease_records_key("headrace.other")):
            client.set(name, "by hand")
        told = run(url_of(main, "operator"))
        assert (told["left"], told["files_searched"]) == ([], False)
        assert not client.exists(stream_key("r1"))


def test_holders_of_conversations_are_removed(main: ServerWithUsers) -> None:
    with connect(url_of(main, "admin")) as client:
        client.hset(holders_key(QUEUE), mapping={"c1 acme": "w 1", "c2 beta": "w 1"})
        assert run(url_of(main, "operator"))["removed"] == {"holders of conversations": 1}
        assert client.hkeys(holders_key(QUEUE)) == [b"c2 beta"]


def test_a_message_that_a_worker_sorted_without_its_tenant_is_open(main: ServerWithUsers) -> None:
    with connect(url_of(main, "admin")) as client:
        client.lpush(LISTS[0], envelope("r1", "acme", id="r1"))
        Leases(client, lease_seconds=60, delivery_limit=5).sort(LISTS)
        ((lease_id, packed),) = client.hgetall(lease_records_key(QUEUE)).items()
        client.hset(lease_records_key(QUEUE), lease_id, pack(msgpack.unpackb(packed) | {"tenant": ""}))
        outcome = click.testing.CliRunner().invoke(
            erase, ["--tenant", "acme", "--yes"], env={"HEADRACE_REDIS_URL": url_of(main, "operator")}
        )
        assert "1 request(s) and 0 batch(es) of acme are open" in outcome.output


def test_a_request_that_a_producer_has_just_sent_is_open(main: ServerWithUsers) -> None:
    with connect(url_of(main, "admin")) as client:
        client.lpush(LISTS[2], envelope("later", "acme", id="later"))
        outcome = click.testing.CliRunner().invoke(
            erase, ["--tenant", "acme", "--yes"], env={"HEADRACE_REDIS_URL": url_of(main, "operator")}
        )
        assert outcome.exit_code == 1
        assert "1 request(s) and 0 batch(es) of acme are open" in outcome.output
        assert client.llen(LISTS[2]) == 1
