"""`headrace generate`, `status` and `cancel` against a real server; a thread of the test plays the worker."""

import json
import threading

import pytest
import redis
from click.testing import CliRunner, Result

from headrace_broker.client.client import Client
from headrace_broker.keys import queue_lists, queue_name
from headrace_broker.models.registry import register_model
from headrace_broker.queue.leases import Leases
from headrace_broker.results import ErrorInfo, Usage
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.streams.writer import StreamWrite, StreamWriter
from headrace_cli.commands.client import cancel, generate, status

MODEL = "tiny"


@pytest.fixture
def redis_url(redis_server: EmbeddedServer) -> str:
    return redis_server.url


def run(command: object, *args: str, redis_url: str) -> Result:
    return CliRunner().invoke(command, [*args, "--redis-url", redis_url])  # type: ignore[arg-type]


def play_worker(client: "redis.Redis", text: str, error: ErrorInfo | None = None) -> threading.Thread:
    """Answer the next message of the queue with one chunk and an end."""

    def answer() -> None:
        _, body = client.brpop([queue_name(MODEL)], timeout=60)
        request_id = json.loads(body)["headers"]["id"]
        writer = StreamWriter(client, 60)
        attempt = writer.claim(request_id, "test").attempt
        chunk = StreamWrite.chunk(
            request_id, attempt, 1, index=0, token_ids=[5], text=text, finish_reason="stop", stop_reason=None
        )
        reason = "error" if error else "stop"
        writer.publish(
            [chunk, StreamWrite.end(request_id, attempt, 1, finish_reason=reason, usage=Usage(3, 0, 1), error=error)]
        )

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def test_generate_prints_the_stream_of_the_only_model(redis_client: "redis.Redis", redis_url: str) -> None:
    register_model(redis_client, MODEL, max_model_len=64, worker="test", seen=0.0)
    worker = play_worker(redis_client, "Hello.")
    result = run(generate, "Say hello", "--max-tokens", "4", redis_url=redis_url)
    worker.join()
    assert result.exit_code == 0, result.output
    assert result.stdout == "Hello.\n"
    assert "3 prompt tokens, 1 generated" in result.stderr


def test_generate_fails_with_the_error_of_the_request(redis_client: "redis.Redis", redis_url: str) -> None:
    register_model(redis_client, MODEL, max_model_len=64, worker="test", seen=0.0)
    worker = play_worker(redis_client, "He", ErrorInfo("engine_error", "the engine is out of order"))
    result = run(generate, "Say hello", redis_url=redis_url)
    worker.join()
    assert result.exit_code != 0
    assert "the engine is out of order" in str(result.exception)


def test_generate_says_what_to_do_when_no_worker_ever_served_a_model(redis_url: str) -> None:
    result = run(generate, "Say hello", redis_url=redis_url)
    assert result.exit_code == 2
    assert "no worker has served a model here yet" in result.output


def test_generate_asks_for_a_choice_among_several_models(redis_client: "redis.Redis", redis_url: str) -> None:
    for name in ("one", "two"):
        register_model(redis_client, name, max_model_len=64, worker="test", seen=0.0)
    result = run(generate, "Say hello", redis_url=redis_url)
    assert result.exit_code == 2
    assert "one, two" in result.output


def test_generate_refuses_a_wrong_parameter_before_anything_is_sent(
    redis_client: "redis.Redis", redis_url: str
) -> None:
    register_model(redis_client, MODEL, max_model_len=64, worker="test", seen=0.0)
    result = run(generate, "Say hello", "--top-p", "7", redis_url=redis_url)
    assert result.exit_code != 0
    assert "top_p" in str(result.exception)
    assert redis_client.llen(queue_name(MODEL)) == 0


def test_status_distinguishes_pending_running_and_finished(redis_client: "redis.Redis", redis_url: str) -> None:
    writer = StreamWriter(redis_client, 60)
    assert "pending" in run(status, "r1", redis_url=redis_url).output
    attempt = writer.claim("r1", "test").attempt
    writer.publish([StreamWrite.chunk("r1", attempt, 2, index=0, token_ids=[1, 2], text="ab")])
    assert "running: 2 tokens, attempt 1" in run(status, "r1", redis_url=redis_url).output
    writer.publish([StreamWrite.end("r1", attempt, 2, finish_reason="length")])
    machine = json.loads(run(status, "r1", "--json", redis_url=redis_url).output)
    assert machine == {"state": "finished", "attempt": 1, "tokens": 2, "finish_reason": "length", "rows": 0}


def test_cancel_ends_a_request_once(redis_client: "redis.Redis", redis_url: str) -> None:
    StreamWriter(redis_client, 60).claim("r2", "test")
    first = run(cancel, "r2", redis_url=redis_url)
    assert (first.exit_code, first.output) == (0, "cancelled\n")
    assert "finished (cancelled)" in run(status, "r2", redis_url=redis_url).output
    StreamWriter(redis_client, 60).claim("r3", "test")
    StreamWriter(redis_client, 60).publish([StreamWrite.end("r3", 1, 0, finish_reason="stop")])
    late = run(cancel, "r3", redis_url=redis_url)
    assert (late.exit_code, late.output) == (1, "the request has already ended\n")


def test_cancel_finds_delayed_held_sorted_and_unsorted_requests(redis_client: "redis.Redis", redis_url: str) -> None:
    register_model(redis_client, MODEL, max_model_len=64, worker="test", seen=0.0)
    leases, lists = Leases(redis_client, lease_seconds=60, delivery_limit=5), queue_lists(queue_name(MODEL))
    with Client(redis_url, model=MODEL) as client:
        for request_id in ("delayed", "held"):
            client.submit("x", request_id=request_id)
        delayed, _ = leases.fetch(lists, 2)
        leases.postpone(delayed.lease_id, 3000)
        client.submit("x", request_id="sorted", priority=9)
        leases.sort(lists)
        for number in range(300):  # more than one scan reads
            client.submit("x", request_id=f"before-{number}")
        client.submit("x", request_id="unsorted")
    for request_id in ("delayed", "held", "sorted", "unsorted"):
        outcome = run(cancel, request_id, redis_url=redis_url)
        assert (outcome.exit_code, outcome.output) == (0, "cancelled\n"), request_id
        assert "finished (cancelled)" in run(status, request_id, redis_url=redis_url).output


def test_cancel_reports_an_unknown_request(redis_client: "redis.Redis", redis_url: str) -> None:
    for _ in range(2):
        outcome = run(cancel, "nosuch", redis_url=redis_url)
        assert outcome.exit_code == 1
        assert "request nosuch is unknown" in outcome.output
    machine = run(cancel, "nosuch", "--json", redis_url=redis_url)
    assert (machine.exit_code, json.loads(machine.output)["known"]) == (1, False)
    assert redis_client.dbsize() == 0


def test_a_user_without_access_to_messages_can_still_cancel(redis_client: "redis.Redis", redis_url: str) -> None:
    redis_client.acl_setuser(
        "narrow",
        enabled=True,
        passwords=["+secret"],
        keys=["headrace:stream:*", "headrace:ended:*", "headrace:models"],
        commands=["+@all"],
    )
    try:
        outcome = run(cancel, "r5", redis_url=redis_url.replace("://", "://narrow:secret@"))
        assert (outcome.exit_code, outcome.output) == (0, "cancelled\n")
    finally:
        redis_client.acl_deluser("narrow")
