"""Webhooks from the publication to a receiver, well-behaved or not, on a real Redis."""

import logging
import time
from collections.abc import Callable

import openai
import pytest
import redis
import standardwebhooks

from headrace_gateway.webhooks.event import Event
from headrace_gateway.webhooks.secret import new_secret, secret_bytes
from service.gateway.webhooks.conftest import MakeReplica, Replica, endpoint
from service.gateway.webhooks.receiver import (
    Answer,
    Receiver,
    endless_body,
    endless_headers,
    hang,
    nonsense,
    reset,
    status,
)

DONE = Event("response.completed", "resp_1", 7, "web", "acme")
LetPass = Callable[[float], None]


def another(number: int) -> Event:
    return Event("response.completed", f"resp_{number}", 7, "web", "acme")


async def publish(replica: Replica, event: Event = DONE, *names: str) -> list[bool]:
    """Do what `Webhooks.publish` does."""
    return [await replica.outbox.put(event, name) for name in names or replica.endpoints]


async def failed_once(made: Replica, receiver: Receiver, let_pass: LetPass, failed: int = 1) -> None:
    """The first attempt failed. Nothing is sent until the retry is due, and the second attempt succeeds."""
    await made.until(lambda: made.attempts("failed") == failed)
    assert len(receiver.received) <= failed
    let_pass(5)


async def test_a_webhook_is_verified_by_openai_and_standardwebhooks(replica: MakeReplica) -> None:
    old, new = new_secret(), new_secret()
    keys = tuple(key for secret in (old, new) if (key := secret_bytes(secret)))
    async with Receiver() as receiver:
        made = (await replica(endpoint("a", receiver.url, secrets=keys))).start()
        assert await publish(made) == [True]
        (got,) = await receiver.wait_for(1)
        await made.until(lambda: made.attempts("delivered") == 1)
    assert got.path == "/hook?token=hidden"
    assert got.headers["content-type"] == "application/json"
    assert got.headers["webhook-id"] == DONE.id == got.event["id"]
    assert abs(int(got.headers["webhook-timestamp"]) - time.time()) < 100
    for secret in (old, new):
        assert standardwebhooks.Webhook(secret).verify(got.body, got.headers) == got.event
        with openai.OpenAI(api_key="unused", webhook_secret=secret) as client:
            unwrapped = client.webhooks.unwrap(got.body, got.headers)
        assert (unwrapped.type, unwrapped.data.id, unwrapped.created_at) == ("response.completed", "resp_1", 7)


async def test_an_event_published_again_is_sent_once(replica: MakeReplica, redis_client: "redis.Redis") -> None:
    async with Receiver() as receiver:
        made = await replica(endpoint("a", receiver.url))
        assert await publish(made) == [True]
        assert await publish(made, replace_time(DONE)) == [False]
        made.start()
        await made.until(lambda: made.attempts("delivered") == 1)
        assert await publish(made) == [False]
        await publish(made, another(2))
        assert [got.event["data"]["id"] for got in await receiver.wait_for(2)] == ["resp_1", "resp_2"]
        await made.until(lambda: made.attempts("delivered") == 2)
    lives = {key: redis_client.ttl(key) for key in redis_client.scan_iter("headrace:gw:webhook:delivery:*")}
    assert len(lives) == 2
    assert all(0 < life <= 3600 for life in lives.values())
    assert redis_client.exists("headrace:gw:work:webhook:a", "headrace:gw:webhook:undelivered:a") == 0


def replace_time(event: Event) -> Event:
    return Event(event.type, event.object_id, event.created_at + 9, event.key, event.tenant)


async def test_two_replicas_send_each_event_once(replica: MakeReplica) -> None:
    async with Receiver() as receiver:
        first, second = [(await replica(endpoint("a", receiver.url))).start() for _ in range(2)]
        for number in range(60):
            await publish(first if number % 2 else second, another(number))
        await first.until(lambda: first.attempts("delivered") + second.attempts("delivered") == 60)
        ids = [got.event["id"] for got in receiver.received]
    assert len(ids) == len(set(ids)) == 60


async def test_a_replica_that_lost_its_claim_leaves_the_delivery_to_the_other(
    replica: MakeReplica, redis_client: "redis.Redis", let_pass: LetPass
) -> None:
    outbox, other = [(await replica(endpoint("a", "http://127.0.0.1:9/"))).outbox for _ in range(2)]
    for record in ("retry", "finish"):
        event = another(record == "retry")
        await outbox.put(event, "a")
        (lost,) = await outbox.claims("a").take(1)
        let_pass(45)
        (held,) = await other.claims("a").take(1)
        delivery = await outbox.delivery("a", event.id)
        assert delivery is not None
        if record == "retry":
            assert not await outbox.retry("a", lost, delivery, after=0)
        else:
            assert not await outbox.finish("a", lost, delivery)
        assert await other.claims("a").take(1) == []
        assert await other.finish("a", held, delivery)
        assert not await outbox.put(event, "a")
        assert redis_client.exists("headrace:gw:work:webhook:a", "headrace:gw:webhook:undelivered:a") == 0


async def test_a_delivery_that_was_recorded_but_not_released_is_not_sent_again(
    replica: MakeReplica, redis_client: "redis.Redis", let_pass: LetPass
) -> None:
    async with Receiver() as receiver:
        made = await replica(endpoint("a", receiver.url))
        await publish(made)
        (claim,) = await made.outbox.claims("a").take(1)
        died = claim._replace(token=claim.token - 1)  # so that only the record is written
        assert not await made.outbox.finish("a", died, await made.outbox.delivery("a", DONE.id))
        let_pass(45)
        made.start()
        await made.until(lambda: not redis_client.exists("headrace:gw:work:webhook:a"))
        assert receiver.received == []


async def test_a_failed_delivery_is_retried_by_the_schedule_until_it_is_given_up(
    replica: MakeReplica, redis_client: "redis.Redis", let_pass: LetPass
) -> None:
    async with Receiver(default=status(500)) as receiver:
        made = (await replica(endpoint("a", receiver.url))).start()
        await publish(made)
        for number, wait in enumerate((5, 300, 1800, 7200, 18000, 36000, 50400, 72000, 86400), 1):
            await made.until(lambda number=number: made.attempts("failed") == number)  # type: ignore[misc]
            assert wait - 60 < seconds_until_due(redis_client) <= wait
            assert len(receiver.received) == number
            let_pass(wait)
        await made.until(lambda: made.attempts("given_up") == 1)
        assert len(receiver.received) == 10
        assert len({got.headers["webhook-id"] for got in receiver.received}) == 1
        assert len({got.body for got in receiver.received}) == 1
    assert redis_client.exists("headrace:gw:work:webhook:a", "headrace:gw:webhook:undelivered:a") == 0


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
async def test_a_redirect_is_a_failure_and_is_not_followed(replica: MakeReplica, let_pass: LetPass, code: int) -> None:
    async with Receiver() as elsewhere, Receiver(status(code, f"location: {elsewhere.url}")) as receiver:
        made = (await replica(endpoint("a", receiver.url))).start()
        await publish(made)
        await failed_once(made, receiver, let_pass)
        await made.until(lambda: made.attempts("delivered") == 1)
        assert len(receiver.received) == 2
        assert elsewhere.received == []


@pytest.mark.parametrize("answer", [hang, reset, nonsense, endless_headers], ids=lambda answer: str(answer.__name__))
async def test_no_answer_is_a_failure(replica: MakeReplica, let_pass: LetPass, answer: Answer) -> None:
    async with Receiver(answer) as receiver:
        made = (await replica(endpoint("a", receiver.url), seconds=1.0)).start()
        await publish(made)
        await failed_once(made, receiver, let_pass)
        await made.until(lambda: made.attempts("delivered") == 1)


async def test_an_endless_body_changes_nothing(replica: MakeReplica, let_pass: LetPass) -> None:
    async with Receiver(endless_body(500), endless_body(200)) as receiver:
        made = (await replica(endpoint("a", receiver.url))).start()
        await publish(made)
        await failed_once(made, receiver, let_pass)
        await made.until(lambda: made.attempts("delivered") == 1)


async def test_a_refused_connection_is_a_failure(replica: MakeReplica, let_pass: LetPass) -> None:
    async with Receiver() as receiver:
        pass
    made = (await replica(endpoint("a", receiver.url))).start()
    await publish(made)
    await made.until(lambda: made.attempts("failed") == 1)


async def test_a_receiver_that_hangs_delays_no_other(replica: MakeReplica) -> None:
    async with Receiver(default=hang) as slow, Receiver() as quick:
        made = (await replica(endpoint("slow", slow.url), endpoint("quick", quick.url))).start()
        for number in range(40):
            await publish(made, another(number), "slow")
        await slow.wait_for(8)
        for number in range(40):
            await publish(made, another(number), "quick")
        await made.until(lambda: made.attempts("delivered") == 40)
        assert len(slow.received) == 8, "one replica has eight attempts under way at one endpoint"


async def test_410_gives_the_event_up_and_the_next_one_is_sent(
    replica: MakeReplica, redis_client: "redis.Redis", let_pass: LetPass
) -> None:
    async with Receiver(status(410)) as receiver:
        made = (await replica(endpoint("a", receiver.url))).start()
        await publish(made)
        await made.until(lambda: made.attempts("given_up") == 1)
        await made.until(lambda: not redis_client.exists("headrace:gw:work:webhook:a"))
        await publish(made, another(2))
        await made.until(lambda: made.attempts("delivered") == 1)
        assert [got.event["data"]["id"] for got in receiver.received] == ["resp_1", "resp_2"]


async def test_the_next_attempt_waits_for_retry_after(
    replica: MakeReplica, redis_client: "redis.Redis", let_pass: LetPass
) -> None:
    async with Receiver(status(503, "retry-after: 600")) as receiver:
        made = (await replica(endpoint("a", receiver.url))).start()
        await publish(made)
        await made.until(lambda: made.attempts("failed") == 1)
        assert 500 < seconds_until_due(redis_client) <= 600
        let_pass(600)
        await made.until(lambda: made.attempts("delivered") == 1)


def seconds_until_due(redis_client: "redis.Redis") -> float:
    ((_, due),) = redis_client.zrange("headrace:gw:work:webhook:a", 0, 0, withscores=True)
    seconds, microseconds = redis_client.time()
    return float(due / 1000 - (seconds + microseconds / 1e6))


async def test_an_event_outside_an_older_file_is_left_to_other_replicas(
    replica: MakeReplica, let_pass: LetPass, caplog: pytest.LogCaptureFixture
) -> None:
    async with Receiver() as receiver:
        newer = await replica(endpoint("a", receiver.url, tenant="acme"))
        older = (await replica(endpoint("a", receiver.url, tenant="rival"))).start()
        await publish(newer)
        await older.until(lambda: older.attempts("failed") == 1)
        assert "the endpoint does not subscribe to it" in caplog.text
        assert receiver.received == []
        await older.stop()
        let_pass(5)
        newer.start()
        await newer.until(lambda: newer.attempts("delivered") == 1)
        assert len(receiver.received) == 1


async def test_an_endpoint_that_left_the_file_gets_nothing(replica: MakeReplica) -> None:
    async with Receiver() as receiver, Receiver() as other:
        made = await replica(endpoint("a", receiver.url), endpoint("b", other.url))
        await publish(made)
        del made.endpoints["a"]
        made.start()
        await made.until(lambda: made.attempts("delivered") == 1)
        assert receiver.received == []
        assert len(other.received) == 1


async def test_undelivered_events_are_reported_with_their_age(
    replica: MakeReplica, redis_client: "redis.Redis", let_pass: LetPass
) -> None:
    async with Receiver(default=status(500)) as receiver:
        made = (await replica(endpoint("a", receiver.url))).start()
        for number in range(3):
            await publish(made, another(number))
        await made.until(lambda: made.attempts("failed") == 3)
        redis_client.zincrby("headrace:gw:webhook:undelivered:a", -5_000_000, another(1).id)
        await made.until(lambda: made.value("headrace_gateway_webhooks_oldest_undelivered_seconds") >= 5000)
        assert made.value("headrace_gateway_webhooks_undelivered") == 3
        receiver.default = status(200)
        let_pass(5)
        await made.until(lambda: made.value("headrace_gateway_webhooks_undelivered") == 0)
        assert made.value("headrace_gateway_webhooks_oldest_undelivered_seconds") == 0


async def test_every_key_expires(replica: MakeReplica, redis_client: "redis.Redis") -> None:
    made = await replica(endpoint("a", "http://127.0.0.1:9/"))
    await publish(made)
    keys = list(redis_client.scan_iter("headrace:gw:w*"))
    assert len(keys) == 3
    assert all(0 < redis_client.ttl(key) <= 4 * 86400 for key in keys)
    made.start()
    await made.until(lambda: made.attempts("failed") == 1)
    keys = list(redis_client.scan_iter("headrace:gw:w*"))
    assert all(0 < redis_client.ttl(key) <= 4 * 86400 for key in keys)


async def test_an_expired_event_is_given_up(
    replica: MakeReplica, redis_client: "redis.Redis", caplog: pytest.LogCaptureFixture
) -> None:
    async with Receiver() as receiver:
        made = await replica(endpoint("a", receiver.url))
        await publish(made)
        redis_client.delete(f"headrace:gw:webhook:delivery:a:{DONE.id}")
        made.start()
        await made.until(lambda: f"webhook expired endpoint=a webhook_event={DONE.id} days=4" in caplog.text)
        assert made.attempts("given_up") == 1
        assert not redis_client.exists("headrace:gw:work:webhook:a", "headrace:gw:webhook:undelivered:a")
        assert receiver.received == []


async def test_the_log_names_endpoint_and_event_and_no_url(
    replica: MakeReplica, let_pass: LetPass, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with Receiver(status(500), reset) as receiver:
            made = (await replica(endpoint("a", receiver.url))).start()
            await publish(made)
            await failed_once(made, receiver, let_pass)
            await made.until(lambda: made.attempts("failed") == 2)
            let_pass(10**6)
            await made.until(lambda: made.attempts("delivered") == 1)
    lines = [record.getMessage() for record in caplog.records if "webhook" in record.name]
    for field in ("endpoint=a", f"webhook_event={DONE.id}", "type=response.completed", "attempt=1", "status=500"):
        assert field in lines[0].split()
    assert "webhook delivered" in lines[-1]
    assert not any("hidden" in line or "127.0.0.1" in line for line in lines)
