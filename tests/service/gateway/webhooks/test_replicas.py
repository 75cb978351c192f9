"""Webhooks of real `headrace gateway` processes: configuration, a killed replica, and a command."""

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import redis

from headrace_broker.server.connections import connect_async
from headrace_broker.server.embedded import EmbeddedServer
from headrace_gateway.webhooks.event import Event
from headrace_gateway.webhooks.outbox import Outbox
from headrace_gateway.webhooks.secret import new_secret
from service.gateway.gateway_process import GatewayProcess
from service.gateway.in_process import running_app
from service.gateway.webhooks.receiver import PATIENCE, Receiver, hang, status

EVENT = Event("batch.completed", "batch_1", 7, "anyone", None)
SECRET = new_secret()


def write(path: Path, url: str, *lines: str) -> Path:
    entry = ["[[endpoints]]", 'name = "a"', f'url = "{url}"', f'secret = "{SECRET}"', "allow_http = true", *lines, ""]
    new = path.with_suffix(".new")
    new.write_text("\n".join(entry), encoding="utf-8")
    new.chmod(0o600)
    new.replace(path)
    return path


@pytest.fixture
async def publish(redis_server: EmbeddedServer) -> AsyncIterator[Callable[..., object]]:
    """Do what a gateway does when a response or a batch ends."""
    async with connect_async(redis_server.url) as client:
        outbox = Outbox(client)

        async def publish(event: Event) -> bool:
            return await outbox.put(event, "a")

        yield publish


async def test_deliveries_of_a_killed_replica_are_sent_by_another_with_the_same_id(
    redis_server: EmbeddedServer,
    redis_client: "redis.Redis",
    publish: Callable[..., object],
    let_pass: Callable[[float], None],
    tmp_path: Path,
) -> None:
    async with AsyncExitStack() as stack:
        receiver = await stack.enter_async_context(Receiver(hang))
        file = write(tmp_path / "webhooks.toml", receiver.url, "allow_private = true")

        def start(name: str) -> GatewayProcess:
            process = GatewayProcess(redis_url=redis_server.url, log=tmp_path / f"{name}.log", webhooks=file)
            stack.callback(process.close)
            return process

        first = start("first")
        assert await publish(EVENT)  # type: ignore[misc]
        await receiver.wait_for(1)
        first.kill()
        second = start("second")
        await asyncio.to_thread(second.wait_ready)
        assert len(receiver.received) == 1
        let_pass(45)
        one, two = await receiver.wait_for(2)
        assert one.headers["webhook-id"] == two.headers["webhook-id"] == EVENT.id
        assert one.body == two.body
        async with asyncio.timeout(PATIENCE):
            while redis_client.exists("headrace:gw:work:webhook:a"):
                await asyncio.sleep(0.01)
        assert len(receiver.received) == 2
        assert "token=hidden" not in second.log_text()
        assert SECRET not in second.log_text()


async def test_a_gateway_reloads_a_changed_webhook_file(redis_server: EmbeddedServer, tmp_path: Path) -> None:
    async with Receiver() as receiver:
        file = write(tmp_path / "webhooks.toml", receiver.url, "allow_private = true")
        async with running_app(redis_server.url, webhooks=file) as (app, _):
            webhooks = app.state.gateway.webhooks
            await webhooks.publish("batch.completed", "batch_1", key="web", tenant="acme", at=7)
            await webhooks.publish("batch.completed", "batch_1", key="web", tenant="acme", at=8)
            (got,) = await receiver.wait_for(1)
            assert got.event == {
                "id": EVENT.id,
                "object": "event",
                "created_at": 7,
                "type": "batch.completed",
                "data": {"id": "batch_1"},
            }
            write(file, receiver.url, "allow_private = true", 'tenant = "rival"')
            async with asyncio.timeout(PATIENCE):
                while webhooks._endpoints.content()["a"].tenant is None:  # it checks the file once a second
                    await asyncio.sleep(0.01)
            await webhooks.publish("batch.failed", "batch_2", key="web", tenant="acme", at=9)
            await webhooks.publish("batch.failed", "batch_3", key="web", tenant="rival", at=9)
            got = (await receiver.wait_for(2))[-1]
            assert got.event["data"] == {"id": "batch_3"}


async def test_a_stopping_gateway_lets_an_open_attempt_end(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    answered = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answered.wait()
        await status(200)(reader, writer)

    async with Receiver(slow) as receiver:
        file = write(tmp_path / "webhooks.toml", receiver.url, "allow_private = true")
        async with running_app(redis_server.url, webhooks=file) as (app, _):
            await app.state.gateway.webhooks.publish("batch.failed", "batch_1", key="web", tenant=None, at=7)
            await receiver.wait_for(1)
            asyncio.get_running_loop().call_later(0.5, answered.set)  # the gateway is stopping by then
    assert redis_client.exists("headrace:gw:work:webhook:a") == 0
    assert len(receiver.received) == 1


async def test_a_gateway_without_a_webhook_file_announces_nothing(
    redis_server: EmbeddedServer, redis_client: "redis.Redis"
) -> None:
    async with running_app(redis_server.url) as (app, _):
        await app.state.gateway.webhooks.publish("batch.failed", "batch_1", key="web", tenant=None, at=7)
        with pytest.raises(AssertionError, match=r"batch\.done"):
            await app.state.gateway.webhooks.publish("batch.done", "batch_1", key="web", tenant=None, at=7)
    assert list(redis_client.scan_iter("headrace:gw:w*")) == []


def headrace(*arguments: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", "from headrace_cli.main import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_a_gateway_with_a_faulty_webhook_file_does_not_start(tmp_path: Path) -> None:
    file = write(tmp_path / "webhooks.toml", "http://127.0.0.1:1/")
    ended = headrace("gateway", "--webhooks", str(file))
    assert ended.returncode == 1
    assert ended.stderr.startswith("headrace: the webhook file ")
    assert "line 1: url must lead to a public address: 127.0.0.1 is a private address" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    file.chmod(0o644)
    assert "any user may read or write it (mode 0644)" in headrace("gateway", "--webhooks", str(file)).stderr


def test_a_command_makes_a_secret() -> None:
    made = headrace("webhook-secret")
    assert re.fullmatch(r"whsec_[A-Za-z0-9+/]{43}=\n", made.stdout)
