"""Dead letters through the client and the command line, against a real server."""

import json
from collections.abc import Iterator

import pytest
import redis
from click.testing import CliRunner, Result

from headrace_broker.client.client import Client
from headrace_broker.client.pooling_calls import pooling_call
from headrace_broker.errors import QueueUnavailableError
from headrace_broker.keys import engine_losses_key, listener_key, queue_lists, queue_name, result_key, stream_key
from headrace_broker.models.registry import register_model
from headrace_broker.queue.dead_letters import requeue
from headrace_broker.queue.leases import Leases
from headrace_broker.results import ErrorInfo
from headrace_broker.server.connections import connect
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.settings import BrokerSettings
from headrace_broker.streams.listeners import Listeners
from headrace_broker.streams.writer import Ending, StreamWriter
from headrace_cli.commands.dead import dead_letters
from headrace_wire.codes import DeadLetterReason
from service.servers import make_server

MODEL = "m"


@pytest.fixture
def client(redis_server: EmbeddedServer, redis_client: "redis.Redis") -> Iterator[Client]:
    register_model(redis_client, MODEL, max_model_len=1, worker="w", seen=1.0)
    with Client(redis_server.url, model=MODEL) as client:
        yield client


def dead_letter(client: Client, redis_client: "redis.Redis", *request_ids: str, reason: str = "poison: killed") -> None:
    """Dead-letter requests as a worker does: end their streams, and store their results."""
    leases = Leases(redis_client, lease_seconds=60, delivery_limit=5)
    for request_id in request_ids:
        client.submit("the wheel Zanzibar", request_id=request_id)
        [message] = leases.fetch(queue_lists(queue_name(MODEL)), 1)
        why, _, detail = reason.partition(": ")
        leases.dead_letter(message.lease_id, DeadLetterReason(why), detail)
        StreamWriter(redis_client, 60).end_unclaimed(request_id, "error", ErrorInfo("dead_letter", "x"))
        redis_client.set(result_key(request_id), "x")
        redis_client.set(engine_losses_key(request_id), 2)


def run(server: EmbeddedServer, *arguments: str) -> Result:
    return CliRunner().invoke(dead_letters, [*arguments, "--redis-url", server.url])


def test_a_requeued_letter_is_a_new_request_under_its_old_id(client: Client, redis_client: "redis.Redis") -> None:
    dead_letter(client, redis_client, "a", "b")
    newest, oldest = client.dead_letters()
    assert [letter.request_id for letter in client.requeue_dead_letters([newest, oldest])] == ["a", "b"]
    assert client.requeue_dead_letters([newest]) == []
    assert client.dead_letters() == []
    assert redis_client.exists(stream_key("a"), result_key("a"), engine_losses_key("a"), stream_key("b")) == 0
    leases = Leases(redis_client, lease_seconds=60, delivery_limit=5)
    messages = leases.fetch(queue_lists(queue_name(MODEL)), 10)
    assert [(message.body, message.deliveries) for message in messages] == [(oldest.body, 1), (newest.body, 1)]


def test_a_requeued_letter_is_abandoned_no_earlier_than_a_new_request(
    client: Client, redis_client: "redis.Redis"
) -> None:
    dead_letter(client, redis_client, "a")
    redis_client.set(listener_key("a"), "30", ex=100)  # no subscriber's heartbeat for almost a day
    client.requeue_dead_letters(client.dead_letters())
    assert Listeners(redis_client).silence({"a": 30.0})["a"] < 30


def test_a_letter_names_its_task_unless_the_message_has_an_unknown_one(
    client: Client, redis_client: "redis.Redis"
) -> None:
    lists = queue_lists(queue_name(MODEL))
    client.submit("x")
    client.submit_pooling(pooling_call("embed", {"input": "x"}, {"model": MODEL}, None).submissions)
    client.submit("x")
    [body, *others] = redis_client.lrange(lists[0], 0, -1)
    redis_client.delete(lists[0])
    redis_client.rpush(lists[0], body.replace(b"headrace.generate", b"<script>alert(1)"), *others)
    leases = Leases(redis_client, lease_seconds=60, delivery_limit=5)
    for message in leases.fetch(lists, 3):
        leases.dead_letter(message.lease_id, DeadLetterReason.POISON, "killed")
    tasks = [letter.summary()["task"] for letter in client.dead_letters()]
    assert sorted(tasks, key=str) == [None, "headrace.embed", "headrace.generate"]


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_copy_of_a_queued_or_running_message_is_not_requeued_and_its_stream_stays(
    client: Client, redis_client: "redis.Redis", is_taken: bool
) -> None:
    lists = queue_lists(queue_name(MODEL))
    leases = Leases(redis_client, lease_seconds=60, delivery_limit=5)
    client.submit("x", request_id="a")
    [body] = redis_client.lrange(lists[0], 0, -1)
    redis_client.lpush(lists[0], body)
    [message] = leases.fetch(lists, 1)
    StreamWriter(redis_client, 60).claim("a", "w")
    if not is_taken:
        leases.requeue(message.lease_id)
    letters = client.dead_letters()
    assert [letter.reason for letter in letters] == ["duplicate"]
    assert client.requeue_dead_letters(letters) == []
    assert client.dead_letters() == letters
    assert client.status("a").state == "running"


def test_a_letter_with_the_stream_of_another_message_is_not_requeued(
    client: Client, redis_client: "redis.Redis"
) -> None:
    dead_letter(client, redis_client, "a")
    redis_client.delete(stream_key("a"))
    error = ErrorInfo("dead_letter", "x")
    StreamWriter(redis_client, 60).end_unclaimed("a", "error", error, "the digest of another message")
    [letter] = client.dead_letters()
    assert client.requeue_dead_letters([letter]) == []
    assert redis_client.exists(stream_key("a"), result_key("a")) == 2
    redis_client.delete(stream_key("a"))
    StreamWriter(redis_client, 60).end_unclaimed("a", "error", error, letter.content)
    assert client.requeue_dead_letters([letter]) == [letter]


def test_a_letter_on_another_server_is_not_requeued_while_its_request_runs(redis_client: "redis.Redis") -> None:
    writer = StreamWriter(redis_client, 60)
    with make_server() as second, connect(second.url) as other, Client(second.url, model=MODEL) as client:
        dead_letter(client, other, "a")
        [letter] = client.dead_letters()
        writer.claim("a", "w", content=letter.content)  # another operator has requeued it a moment before
        assert requeue(redis_client, [letter], other) == []
        assert StreamWriter(redis_client, 60).end_unclaimed("a", "stop", None, letter.content) is Ending.WRITTEN
        assert requeue(redis_client, [letter], other) == [letter]
        assert redis_client.exists(stream_key("a")) == 0


def test_a_copy_of_a_message_that_was_served_is_not_requeued(client: Client, redis_client: "redis.Redis") -> None:
    lists = queue_lists(queue_name(MODEL))
    leases = Leases(redis_client, lease_seconds=60, delivery_limit=5)
    client.submit("x", request_id="a")
    [body] = redis_client.lrange(lists[0], 0, -1)
    redis_client.lpush(lists[0], body)
    [message] = leases.fetch(lists, 1)
    StreamWriter(redis_client, 60).end_unclaimed("a", "stop", None)
    leases.ack(message.lease_id)
    assert client.requeue_dead_letters(client.dead_letters()) == []
    assert redis_client.exists(stream_key("a")) == 1


def test_purged_letters_are_gone_and_the_others_stay(client: Client, redis_client: "redis.Redis") -> None:
    dead_letter(client, redis_client, "a", "b", "c")
    c, b, a = client.dead_letters()
    assert client.purge_dead_letters([b, b]) == 1
    assert [letter.request_id for letter in client.dead_letters()] == ["c", "a"]
    assert client.purge_dead_letters([a, b, c]) == 2


def test_the_command_line_lists_and_inspects_without_the_prompt(
    client: Client, redis_client: "redis.Redis", redis_server: EmbeddedServer
) -> None:
    dead_letter(client, redis_client, "a")
    dead_letter(client, redis_client, "b", reason="rejected")
    listed = run(redis_server, "list", "--json")
    assert [letter["request_id"] for letter in json.loads(listed.stdout)] == ["b", "a"]
    assert run(redis_server, "list", "--reason", "poison").stdout.count("\n") == 1
    assert run(redis_server, "list", "--model", "other").stdout == ""
    shown = run(redis_server, "inspect", "a")
    assert json.loads(shown.stdout)["reason"] == "poison: killed"
    assert "body" not in json.loads(shown.stdout)
    assert "body" in json.loads(run(redis_server, "inspect", "a", "--body").stdout)
    assert run(redis_server, "inspect", "z").exit_code == 1


def test_the_command_line_requeues_and_purges_the_selected_letters(
    client: Client, redis_client: "redis.Redis", redis_server: EmbeddedServer
) -> None:
    dead_letter(client, redis_client, "a", "b")
    dead_letter(client, redis_client, "c", reason="rejected")
    assert run(redis_server, "purge").exit_code == 2
    assert run(redis_server, "requeue", "a", "--all").exit_code == 2
    assert run(redis_server, "requeue", "a").stdout == "1 requeued\n"
    assert run(redis_server, "purge", "--all", "--reason", "rejected", "--json").stdout == '{"purged": 1}\n'
    [letter] = client.dead_letters()
    assert run(redis_server, "purge", letter.letter_id).stdout == "1 deleted\n"


def test_the_letters_of_other_servers_are_listed_while_one_is_away(
    redis_server: EmbeddedServer, client: Client, redis_client: "redis.Redis"
) -> None:
    dead_letter(client, redis_client, "a")
    register_model(redis_client, "other", max_model_len=1, worker="w", seen=1.0)
    with make_server() as second:
        urls = f"other={second.url}"
        second.kill()
        with Client(BrokerSettings(redis_server.url, queue_urls=urls)) as clients:
            missing: list[str] = []
            assert [letter.request_id for letter in clients.dead_letters(on_away=missing.append)] == ["a"]
            assert len(missing) == 1
            assert f"without those of headrace.other: 127.0.0.1:{second.port} is away" in missing[0]
            with pytest.raises(QueueUnavailableError):
                clients.dead_letters()
        shown = CliRunner().invoke(
            dead_letters, ["list", "--redis-url", redis_server.url], env={"HEADRACE_QUEUE_URLS": urls}
        )
        assert shown.exit_code == 0
        assert len(shown.stdout.splitlines()) == 1
        assert "without those of headrace.other" in shown.stderr
        purged = CliRunner().invoke(
            dead_letters, ["purge", "--all", "--redis-url", redis_server.url], env={"HEADRACE_QUEUE_URLS": urls}
        )
        assert (purged.exit_code, purged.stdout) == (1, "1 deleted\n")
