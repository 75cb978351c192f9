"""The Redis users of deploy/redis/users.acl on real servers: each can do the work of its role, and nothing else."""

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from kombu.exceptions import OperationalError

from headrace_broker.client.client import Client
from headrace_broker.client.tokenizer_calls import TokenizerCalls
from headrace_broker.errors import QueueFullError, TenantQueueFullError, UnknownModelError
from headrace_broker.key_schema import RedisKey
from headrace_broker.keys import KEYS, queue_lists, result_key
from headrace_broker.models.registry import register_model
from headrace_broker.packing import pack
from headrace_broker.queue.leases import Leases
from headrace_broker.queue.levels import QueueLevelReader
from headrace_broker.results import ChoiceOutput, GenerateResult, Usage
from headrace_broker.server.connections import connect
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.settings import BrokerSettings
from headrace_broker.streams.events import EndEvent
from headrace_broker.streams.writer import StreamWrite, StreamWriter
from headrace_cli.exporter import Exporter
from headrace_gateway.redis import keys as redis_keys
from headrace_gateway.webhooks.secret import new_secret
from service.gateway.in_process import bearer, running_app, write_keys
from service.gateway.webhooks.receiver import Receiver, status
from service.redis_users import ServerWithUsers, url_of, users
from service.servers import EVERY_PROGRAM
from service.workers.conftest import model_folder
from service.workers.service import Service

__all__ = ["model_folder"]


@pytest.fixture(scope="module", params=EVERY_PROGRAM)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with ServerWithUsers(tmp_path_factory.mktemp("acl"), program=request.param) as running:
        yield running


def test_only_the_named_users_exist_and_nobody_can_be_the_default_one(server: EmbeddedServer) -> None:
    named = {"default", "admin", "worker", "operator", "client", "producer", "subscriber", "exporter", "gateway"}
    with connect(url_of(server, "admin")) as admin:
        assert set(admin.acl_users()) == named
        rules = admin.acl_getuser("default")
    assert "off" in rules["flags"]
    assert "nopass" not in rules["flags"]
    assert not rules["passwords"]
    for credentials in ("default:secret@", ":secret@", "default:@", ":default@"):
        stranger = connect(f"redis://{credentials}127.0.0.1:{server.port}/0")
        with stranger, pytest.raises(redis.exceptions.AuthenticationError):
            stranger.ping()


def test_a_connection_needs_the_name_and_password_of_a_user(server: EmbeddedServer) -> None:
    address = f"redis://127.0.0.1:{server.port}/0"
    with connect(address) as anonymous, pytest.raises(redis.exceptions.AuthenticationError):
        anonymous.ping()
    impostor = connect(address.replace("redis://", "redis://worker:wrong@"))
    with impostor, pytest.raises(redis.exceptions.AuthenticationError):
        impostor.ping()


def test_a_request_is_served_while_each_process_has_its_own_user(
    server: EmbeddedServer, model_folder: str, tmp_path: Path
) -> None:
    service = Service(server, model_folder, tmp_path, url=url_of(server, "admin"))
    try:
        worker = service.start_worker(redis_url=url_of(server, "worker")).wait_ready()
        settings = BrokerSettings(url_of(server, "client"), max_queued_requests=9, max_queued_requests_per_tenant=9)
        with Client(settings, model="tiny") as client:
            request_id = client.submit("the wheel", {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True})
            assert sum(len(chunk.token_ids) for chunk in client.stream(request_id, timeout=60)) == 4
            assert client.result(request_id, timeout=60).usage is not None
        with connect(url_of(server, "exporter")) as reader:
            exporter = Exporter(reader, port=0)
            exporter.poll()
            exposition = exporter.exposition.exposition()
            assert re.search(rb"headrace_exporter_redis_up{server=.*} 1.0", exposition)
            assert b'headrace_outstanding_tokens{model="tiny",queue="headrace.tiny",state="waiting"} 0.0' in exposition
        assert "NoPermission" not in worker.log_text()
        assert "permissions" not in worker.log_text()
        # Celery's remote control, which can stop workers, is for the operator
        operator = Celery(broker=url_of(server, "operator"), set_as_current=False)
        operator.conf.update(task_serializer="msgpack", accept_content=["msgpack"])
        assert operator.control.inspect(timeout=60, limit=1).ping()
        operator.close()
    finally:
        service.close()


@pytest.fixture
def stream_of_another(server: EmbeddedServer) -> Iterator[str]:
    """A request of another client, in a queue; it has a stream and a result, too."""
    with connect(url_of(server, "admin")) as admin, Client(url_of(server, "admin"), model="tiny") as other:
        admin.flushdb()
        admin.acl_log_reset()
        register_model(admin, "tiny", max_model_len=64, worker="w", seen=0)
        other.submit("a secret prompt", tenant="acme")
        request_id = other.submit("another secret prompt", tenant="acme", idempotency_key="k")
        Leases(admin, lease_seconds=60, delivery_limit=5).fetch(queue_lists("headrace.tiny"), 1)
        StreamWriter(admin, 600).claim(request_id, "w")
        admin.set(result_key(request_id), pack({"status": "SUCCESS"}))
        yield request_id


def answer(server: EmbeddedServer, request_id: str) -> None:
    """Play the worker, as its user: write four tokens, the end and the result."""
    with connect(url_of(server, "worker")) as worker:
        writer = StreamWriter(worker, 600)
        attempt = writer.claim(request_id, "w").attempt
        writer.publish(
            [
                StreamWrite.chunk(request_id, attempt, 4, index=0, token_ids=[1, 2, 3, 4], text="four"),
                StreamWrite.end(request_id, attempt, 4, finish_reason="stop", usage=Usage(1, 0, 4)),
            ]
        )
        output = ChoiceOutput(0, "four", [1, 2, 3, 4], finish_reason="stop")
        result = GenerateResult(request_id, [output], Usage(1, 0, 4)).to_wire()
        stored = pack({"task_id": request_id, "status": "SUCCESS", "result": result, "traceback": None, "children": []})
        worker.set(result_key(request_id), stored)
        worker.publish(result_key(request_id), stored)


@pytest.mark.parametrize(("sender", "reader"), [("client", "client"), ("producer", "subscriber")])
def test_the_client_library_can_do_all_its_work(
    server: EmbeddedServer, stream_of_another: str, sender: str, reader: str
) -> None:
    settings = BrokerSettings(url_of(server, sender), max_queued_requests=9, max_queued_requests_per_tenant=2)
    with Client(settings, model="tiny") as producer, Client(url_of(server, reader)) as subscriber:
        request_id = producer.submit("x", tenant="t", idempotency_key="k", abandon_after=60, priority=5)
        assert producer.submit("x", tenant="t", idempotency_key="k", abandon_after=60) == request_id
        [cancelled] = producer.submit_many([{"prompt": "y", "tenant": "t"}])
        with connect(url_of(server, "worker")) as worker:
            Leases(worker, lease_seconds=60, delivery_limit=5).fetch(queue_lists("headrace.tiny"), 0)
        with pytest.raises(TenantQueueFullError, match="holds 2 of at most 2"):
            producer.submit("z", tenant="t")
        with pytest.raises(QueueFullError, match="holds 3 of at most 9"):
            producer.submit_many([{"prompt": "z"}] * 7)
        with pytest.raises(UnknownModelError):
            producer.submit("z", model="unheard-of")
        assert producer.cancel(cancelled)
        assert producer.status(cancelled).finish_reason == "cancelled"
        answer(server, request_id)
        assert [chunk.text for chunk in subscriber.stream(request_id, timeout=60)] == ["four"]
        assert [type(event) for _, event in subscriber.events_many([cancelled], timeout=60)] == [EndEvent]
        assert subscriber.result(request_id, timeout=60).outputs[0].text == "four"
    with connect(url_of(server, "admin")) as admin:
        assert admin.acl_log() == []


async def test_the_gateway_can_do_all_its_work(server: EmbeddedServer, stream_of_another: str, tmp_path: Path) -> None:
    with connect(url_of(server, "admin")) as admin:
        letter = {"reason": "poison", "list": QUEUE, "deliveries": 1, "body": b"{}", "at": 1.0}
        admin.lpush("headrace:dead:headrace.tiny", pack(letter), pack({**letter, "at": 2.0}))
    keys = write_keys(tmp_path / "keys", "web", requests_per_minute="9", tokens_per_minute="20")
    url = url_of(server, "gateway")
    async with running_app(url, keys=tmp_path / "keys") as (app, client):
        assert (await client.get("/ready")).status_code == 200
        headers = {**bearer(keys["web"]), "Idempotency-Key": "k"}
        body = {"model": "tiny", "prompt": "a", "max_tokens": 4, "stream": True}
        reading = asyncio.create_task(client.post("/v1/completions", json=body, headers=headers))
        with connect(url_of(server, "worker")) as worker:
            [request_id] = await asyncio.to_thread(requests_of_gateway, worker)
        await asyncio.to_thread(answer, server, request_id)
        response = await reading
        assert "four" in response.text
        again = f"/v1/completions/{request_id}?stream=true"
        assert (await client.get(again, headers=bearer(keys["web"]))).text == response.text
        await store_a_response(server, client, keys["web"])
        broker = app.state.gateway.client
        assert await broker.is_known("never-seen") is False
        letters = await broker.dead_letters()
        assert len(await broker.requeue_dead_letters(letters[:1])) == 1
        assert await broker.purge_dead_letters(letters[1:]) == 1
        assert await broker.cancel(stream_of_another)
        await app.state.batches.expire_requests([request_id])
    with connect(url) as reader:
        level = QueueLevelReader(reader).read([QUEUE])[QUEUE]
        assert level.problem is None
    with connect(url_of(server, "admin")) as admin:
        assert float(admin.hget("headrace:gw:rate:web", "tokens").split()[0]) < 20
        assert admin.acl_log() == []


async def test_the_gateway_sends_webhooks(server: EmbeddedServer, tmp_path: Path) -> None:
    with connect(url_of(server, "admin")) as admin:
        admin.flushdb()
        admin.acl_log_reset()
    async with Receiver(status(500)) as receiver:
        file = tmp_path / "webhooks.toml"
        rights = "allow_http = true\nallow_private = true\n"
        file.write_text(f'[[endpoints]]\nname = "a"\nurl = "{receiver.url}"\nsecret = "{new_secret()}"\n{rights}')
        file.chmod(0o600)
        async with running_app(url_of(server, "gateway"), webhooks=file) as (app, _):
            publish = app.state.gateway.webhooks.publish
            await publish("batch.failed", "batch_1", key="web", tenant=None, at=7)
            await receiver.wait_for(1)
            await publish("batch.failed", "batch_2", key="web", tenant=None, at=7)
            await receiver.wait_for(2)
    with connect(url_of(server, "admin")) as admin:
        assert admin.acl_log() == []


async def test_the_gateway_calls_the_tokenizer_of_a_worker(server: EmbeddedServer) -> None:
    with connect(url_of(server, "admin")) as admin:
        admin.flushdb()
        admin.acl_log_reset()
        register_model(admin, "tiny", max_model_len=64, worker="w", seen=time.time(), tokenizer_calls=True)
    async with running_app(url_of(server, "gateway")) as (_, client):
        asking = asyncio.create_task(client.post("/detokenize", json={"tokens": [1]}))
        with connect(url_of(server, "worker")) as worker:
            calls = TokenizerCalls(worker, ["tiny"])
            while (call := await asyncio.to_thread(calls.take, 1.0)) is None:
                pass
            calls.answer(call, pack({"result": {"prompt": "four"}}))
        assert (await asking).json() == {"prompt": "four"}
    with connect(url_of(server, "admin")) as admin:
        assert admin.acl_log() == []


async def store_a_response(server: EmbeddedServer, client: Any, key: str) -> None:
    """Create a response in the background, wait until the collector has stored it, and call every endpoint of it."""
    body = {"model": "tiny", "input": "a", "max_output_tokens": 4, "background": True}
    created = (await client.post("/v1/responses", json=body, headers=bearer(key))).json()["id"]
    with connect(url_of(server, "worker")) as worker:
        assert await asyncio.to_thread(requests_of_gateway, worker, "resp_") == [created]
    await asyncio.to_thread(answer, server, created)
    path = f"/v1/responses/{created}"
    assert "four" in (await client.get(f"{path}?stream=true", headers=bearer(key))).text
    with connect(url_of(server, "admin")) as admin:
        while not admin.hexists(f"headrace:gw:response:{created}", "state"):
            await asyncio.sleep(0.02)
    for method, url in (("GET", path), ("GET", f"{path}/input_items"), ("POST", f"{path}/cancel"), ("DELETE", path)):
        assert (await client.request(method, url, headers=bearer(key))).status_code == 200


def requests_of_gateway(worker: "redis.Redis", prefix: str = "cmpl-") -> list[str]:
    """Wait until the gateway has sent a request; it has written the envelope before."""
    leases = Leases(worker, lease_seconds=60, delivery_limit=5)
    while True:
        for lease in leases.fetch(queue_lists(QUEUE), 1):
            request_id = json.loads(lease.body)["headers"]["id"]
            if request_id.startswith(prefix):
                return [request_id]


def test_a_quota_counts_sorted_messages_for_a_user_that_may_not_read_them(
    server: EmbeddedServer, stream_of_another: str
) -> None:
    settings = BrokerSettings(url_of(server, "producer"), max_queued_requests_per_tenant=2)
    with Client(settings, model="tiny") as producer, connect(url_of(server, "worker")) as worker:
        for _ in range(3):
            producer.submit("x", tenant="t")
        Leases(worker, lease_seconds=60, delivery_limit=5).fetch(queue_lists("headrace.tiny"), 0)
        with pytest.raises(TenantQueueFullError):
            producer.submit("x", tenant="t")


PLAIN_CELERY = """
import sys
from celery import Celery

app = Celery(broker=sys.argv[1], backend=sys.argv[2] or None)
app.conf.update(task_serializer="msgpack", result_serializer="msgpack", accept_content=["msgpack"])
result = app.send_task(
    "headrace.generate", kwargs={"prompt": "x"}, queue="headrace.tiny", argsrepr="", kwargsrepr="", priority=5
)
print(result.id, flush=True)
if sys.argv[2]:
    print(result.get(timeout=60)["outputs"][0]["text"])
assert not any(name.startswith("headrace") for name in sys.modules)
"""


@pytest.mark.parametrize("user", ["client", "producer"])
def test_plain_celery_sends_a_request_and_gets_its_result(
    server: EmbeddedServer, stream_of_another: str, user: str
) -> None:
    url = url_of(server, user)
    backend = url if user == "client" else ""  # a producer gets no results: Celery would subscribe to them
    with (
        subprocess.Popen(
            [sys.executable, "-c", PLAIN_CELERY, url, backend],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
        connect(url_of(server, "admin")) as admin,
    ):
        assert process.stdout is not None
        request_id = process.stdout.readline().strip()
        waiting = admin.lrange(queue_lists("headrace.tiny")[1], 0, -1)
        assert [json.loads(message)["headers"]["id"] for message in waiting] == [request_id]
        answer(server, request_id)
        rest, errors = process.communicate(timeout=60)
        assert (process.returncode, rest.strip()) == (0, "four" if backend else ""), errors[-2000:]


def test_the_operator_may_broadcast_and_revoke_and_others_may_not(
    server: EmbeddedServer, stream_of_another: str
) -> None:
    def app_of(user: str) -> Celery:
        return Celery(broker=url_of(server, user), backend=url_of(server, user), set_as_current=False)

    app = app_of("operator")
    assert app.control.inspect(timeout=0.1).ping() is None  # no worker answers, and Redis does not refuse
    app.control.revoke(stream_of_another, terminate=True)
    app.close()
    for user in ("client", "producer", "subscriber", "exporter"):
        app = app_of(user)
        with pytest.raises((redis.exceptions.NoPermissionError, OperationalError), match=r"(?i)no.?perm"):
            app.control.revoke(stream_of_another)
        app.close()


WRITES = {
    "string": ["SET k v"],
    "list": ["LPUSH k x", "RPUSH k x", "LPOP k", "BLPOP k 1", "LREM k 1 x"],
    "hash": ["HSET k x y", "HDEL k x"],
    "zset": ["ZADD k 1 x", "ZREM k x"],
    "stream": ["XADD k * x y", "XDEL k 1-1"],
}


def may_write(admin: "redis.Redis", user: str, key: str, kind: str) -> bool:
    commands = [command.split() for command in (*WRITES[kind], "DEL k", "EXPIRE k 9", "PEXPIRE k 9")]
    dry_runs = ([key if part == "k" else part for part in command] for command in commands)
    return any(admin.execute_command("ACL", "DRYRUN", user, *command) == b"OK" for command in dry_runs)


@pytest.mark.parametrize("key", [*KEYS, *redis_keys.KEYS], ids=lambda key: key.name)
def test_the_users_that_may_write_a_key_are_its_declared_writers(server: EmbeddedServer, key: RedisKey) -> None:
    name = re.sub("<[a-z_]+>", "x", key.pattern)
    with connect(url_of(server, "admin")) as admin:
        allowed = {user for user in users() if may_write(admin, user, name, key.type)} - {"default", "admin"}
    assert allowed >= {*key.writers}
    # workers and operators may write all of Headrace's keys, and a client is a producer and a subscriber
    assert allowed - {"worker", "operator", "client"} == {*key.writers} - {"worker", "operator"}
    assert ("client" in allowed) == bool({"producer", "subscriber"} & {*key.writers})


QUEUE = "headrace.tiny"
BINDING = "_kombu.binding.headrace.tiny"
LEASES = "headrace:lease:leases:headrace.tiny"
FORBIDDEN = {
    "names of others' requests": [
        ["KEYS", "*"],
        ["SCAN", "0"],
        ["RANDOMKEY"],
        ["PUBSUB", "CHANNELS"],
        ["PSUBSCRIBE", "celery-task-meta-*"],
        ["PSUBSCRIBE", "*"],
        ["SUBSCRIBE", "__keyspace@0__:headrace:stream:x"],
        ["CLIENT", "TRACKING", "ON", "BCAST"],
        ["CLIENT", "LIST"],
        ["MONITOR"],
        ["SLOWLOG", "GET"],
        ["HGETALL", "headrace:idempotency:x"],
    ],
    "others' prompts": [
        ["LRANGE", QUEUE, "0", "-1"],
        ["LINDEX", QUEUE, "0"],
        ["LPOP", QUEUE],
        ["RPOP", QUEUE],
        ["BRPOP", QUEUE, "1"],
        ["LMOVE", QUEUE, "headrace.mine", "LEFT", "LEFT"],
        ["COPY", QUEUE, "headrace:stream:mine"],
        ["RENAME", QUEUE, "headrace:stream:mine"],
        ["SORT", QUEUE, "ALPHA"],
        ["SORT", QUEUE, "ALPHA", "STORE", "headrace:stream:mine"],
        ["DUMP", QUEUE],
        ["GETRANGE", QUEUE, "0", "-1"],
        ["HVALS", "headrace:lease:body:headrace.tiny"],
        ["HGETALL", "headrace:lease:body:headrace.tiny"],
        ["HGET", "headrace:lease:body:headrace.tiny", "x"],
        ["HRANDFIELD", "headrace:lease:body:headrace.tiny"],
        ["HSCAN", "headrace:lease:body:headrace.tiny", "0"],
        ["LRANGE", "headrace:dead:headrace.tiny", "0", "-1"],
        ["EVAL", "return redis.call('LRANGE', 'headrace.tiny', 0, -1)", "0"],
        ["EVAL", "return redis.call('LRANGE', KEYS[1], 0, -1)", "1", QUEUE],
        ["EVAL_RO", "return redis.call('LRANGE', KEYS[1], 0, -1)", "1", QUEUE],
        ["EVAL_RO", "return redis.call('HVALS', 'headrace:lease:body:headrace.tiny')", "0"],
    ],
    "names of tenants": [
        ["ZRANGE", "headrace:queue:waiting:headrace.tiny", "0", "-1"],
        ["ZRANGE", "headrace:queue:tenants:headrace.tiny", "0", "-1"],
        ["EVAL_RO", "return redis.call('ZRANGE', KEYS[1], 0, -1)", "1", "headrace:queue:waiting:headrace.tiny"],
    ],
    "forged results": [
        ["SET", "celery-task-meta-x", "1"],
        ["SETEX", "celery-task-meta-x", "9", "1"],
        ["DEL", "celery-task-meta-x"],
        ["EXPIRE", "celery-task-meta-x", "0"],
        ["PUBLISH", "celery-task-meta-x", "1"],
        ["SPUBLISH", "celery-task-meta-x", "1"],
        ["EVAL", "return redis.call('SET', 'celery-task-meta-x', 1)", "0"],
        ["EVAL", "return redis.call('PUBLISH', 'celery-task-meta-x', 1)", "0"],
    ],
    "forged leases, settlements and models": [
        ["ZADD", LEASES, "0", "x"],
        ["HSET", "headrace:lease:meta:headrace.tiny", "x", "me|headrace.tiny"],
        ["DEL", "headrace:lease:body:headrace.tiny"],
        ["SET", "headrace:lease:body:headrace.tiny", "x"],
        ["SET", "headrace:queue:wake-up:headrace.tiny", "x"],
        ["ZADD", "headrace:share:served:headrace.tiny", "0", "acme"],
        ["HSET", "headrace:models", "evil", "x"],
        ["SET", "headrace:losses:x", "9"],
        ["LPUSH", "headrace:dead:headrace.tiny", "x"],
        ["LPUSH", "celery", "x"],
        ["LPUSH", "mine.reply.celery.pidbox", "x"],
        ["SADD", "_kombu.binding.celery.pidbox", "x"],
        ["SADD", "_kombu.binding.reply.celery.pidbox", "x"],
        ["SREM", BINDING, "x"],
        ["EVAL", "return redis.call('SET', KEYS[1], 1)", "1", "headrace:lease:body:headrace.tiny"],
        ["EVAL", "return redis.call('SET', 'headrace:lease:body:headrace.tiny', 1)", "0"],
        ["EVAL", "return redis.call('SET', KEYS[1], 1)", "1", "headrace:stream:x"],
    ],
    "deletion of others' data": [
        ["DEL", "headrace:stream:x"],
        ["UNLINK", "headrace:stream:x"],
        ["DEL", QUEUE],
        ["LTRIM", QUEUE, "1", "0"],
        ["LREM", QUEUE, "0", "x"],
        ["EXPIRE", QUEUE, "0"],
        ["XTRIM", "headrace:stream:x", "MAXLEN", "0"],
        ["XDEL", "headrace:stream:x", "1-0"],
        ["PUBLISH", "/0.celery.pidbox", "shutdown"],
        ["PUBLISH", "/0.celeryev/task.received", "x"],
    ],
    "the server": [
        ["FLUSHALL"],
        ["FLUSHDB"],
        ["SWAPDB", "0", "1"],
        ["FUNCTION", "LOAD", "#!lua name=x\nredis.register_function('x', function() return 1 end)"],
        ["FUNCTION", "FLUSH"],
        ["FCALL", "x", "0"],
        ["SCRIPT", "FLUSH"],
        ["SCRIPT", "KILL"],
        ["CONFIG", "GET", "*"],
        ["CONFIG", "SET", "maxmemory", "1"],
        ["DEBUG", "SLEEP", "0"],
        ["ACL", "LIST"],
        ["ACL", "WHOAMI"],
        ["CLIENT", "KILL", "TYPE", "normal"],
        ["CLIENT", "PAUSE", "1"],
        ["CLIENT", "UNBLOCK", "1"],
        ["REPLICAOF", "NO", "ONE"],
        ["SHUTDOWN"],
        ["SAVE"],
        ["MODULE", "LIST"],
        ["MIGRATE", "127.0.0.1", "1", "x", "0", "1"],
        ["RESTORE", "headrace:stream:x", "0", "x"],
    ],
}


@pytest.mark.parametrize("what", FORBIDDEN)
@pytest.mark.parametrize("user", ["client", "producer", "subscriber"])
def test_clients_cannot_reach_data_of_others(
    server: EmbeddedServer, stream_of_another: str, user: str, what: str
) -> None:
    with connect(url_of(server, "admin")) as admin, connect(url_of(server, user)) as client:
        before = sorted(admin.keys())
        for command in FORBIDDEN[what]:
            assert is_refused(client, command), " ".join(command)
        assert sorted(admin.keys()) == before


@pytest.mark.parametrize("what", ["forged leases, settlements and models", "the server"])
def test_a_gateway_cannot_forge_the_state_of_workers(server: EmbeddedServer, stream_of_another: str, what: str) -> None:
    with connect(url_of(server, "gateway")) as client:
        for command in FORBIDDEN[what]:
            assert is_refused(client, command), " ".join(command)


def is_refused(client: "redis.Redis", command: list[str]) -> bool:
    try:
        client.execute_command(*command)
    except redis.exceptions.NoPermissionError:
        return True
    except redis.exceptions.ResponseError as error:  # inside a script, or DEBUG, which is off
        return any(words in str(error) for words in ("ACL failure", "user executing the script", "not allowed"))
    return False


@pytest.mark.parametrize(
    ("user", "command"),
    [
        ("subscriber", ["LPUSH", QUEUE, "x"]),
        ("subscriber", ["XADD", "headrace:stream:x", "*", "type", "end"]),
        ("subscriber", ["EXPIRE", "headrace:stream:x", "0"]),
        ("subscriber", ["SET", "headrace:ended:x", "1"]),
        ("subscriber", ["EVAL", "while true do end", "0"]),
        ("subscriber", ["EVAL_RO", "while true do end", "0"]),
        ("subscriber", ["SCRIPT", "LOAD", "return 1"]),
        ("producer", ["XREAD", "STREAMS", "headrace:stream:x", "0"]),
        ("producer", ["GET", "celery-task-meta-x"]),
        ("producer", ["SUBSCRIBE", "celery-task-meta-x"]),
        ("gateway", ["LPOP", QUEUE]),
        ("gateway", ["DEL", QUEUE]),
        ("gateway", ["HSET", "headrace:models", "evil", "x"]),
        ("gateway", ["LPUSH", "headrace:dead:headrace.tiny", "x"]),
        ("gateway", ["DEL", "headrace:lease:body:headrace.tiny"]),
        ("gateway", ["ZADD", LEASES, "0", "x"]),
        ("gateway", ["SET", "celery-task-meta-x", "1"]),
        ("gateway", ["GET", "somebody-else"]),
        ("gateway", ["BLPOP", "headrace:tokenizer:calls:tiny", "1"]),
        ("gateway", ["RPUSH", "headrace:tokenizer:answer:x", "x"]),
        ("gateway", ["PEXPIRE", "headrace:tokenizer:answer:x", "1"]),
        ("gateway", ["PUBLISH", "/0.celery.pidbox", "shutdown"]),
        ("gateway", ["KEYS", "*"]),
        ("gateway", ["SCAN", "0"]),
        ("gateway", ["MONITOR"]),
        ("gateway", ["FLUSHALL"]),
        ("gateway", ["CONFIG", "SET", "maxmemory", "1"]),
        ("exporter", ["SET", "headrace.x", "1"]),
        ("exporter", ["LPUSH", "headrace.x", "1"]),
        ("exporter", ["GET", "celery-task-meta-x"]),
        ("exporter", ["FLUSHALL"]),
        ("exporter", ["SCAN", "0"]),
        ("exporter", ["CLIENT", "TRACKING", "ON", "BCAST"]),
        ("exporter", ["XRANGE", "headrace:stream:x", "-", "+"]),
        *(
            (user, command)
            for user in ("worker", "operator")
            for command in (
                ["FLUSHALL"],
                ["CONFIG", "SET", "maxmemory", "1"],
                ["GET", "somebody-else"],
                ["ACL", "LIST"],
                ["FUNCTION", "LOAD", "#!lua name=x"],
                ["SCRIPT", "FLUSH"],
            )
        ),
    ],
)
def test_a_command_outside_a_users_role_is_refused(server: EmbeddedServer, user: str, command: list[str]) -> None:
    with connect(url_of(server, user)) as client, pytest.raises(redis.exceptions.NoPermissionError):
        client.execute_command(*command)
