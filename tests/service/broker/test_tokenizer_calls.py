"""Tokenizer calls between a client and a worker, on a real server."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import redis

from headrace_broker.client.tokenizer_calls import (
    ANSWER_SECONDS,
    MAX_CALLS_PER_CLIENT,
    MAX_CALLS_PER_KEY,
    MAX_WAITING_CALLS,
    TokenizerCall,
    TokenizerCalls,
    TokenizerClient,
)
from headrace_broker.errors import TokenizerCallError
from headrace_broker.keys import tokenizer_answer_key, tokenizer_calls_key
from headrace_broker.packing import pack, unpack
from headrace_broker.server.connections import connect, connect_async
from headrace_broker.server.embedded import EmbeddedServer


@pytest.fixture
def client(redis_server: EmbeddedServer) -> "Iterator[redis.Redis]":
    with connect(redis_server.url) as client:
        client.flushdb()
        yield client


@pytest.fixture
async def asking(redis_server: EmbeddedServer) -> "AsyncIterator[redis.asyncio.Redis]":
    connection = connect_async(redis_server.url)
    yield connection
    await connection.aclose()


async def take(calls: TokenizerCalls) -> TokenizerCall:
    while (call := await asyncio.to_thread(calls.take, 1.0)) is None:
        pass
    return call


async def test_a_worker_answers_calls_for_any_of_its_served_names(
    client: "redis.Redis", asking: "redis.asyncio.Redis"
) -> None:
    asked = asyncio.create_task(TokenizerClient(asking).call("m|2", "count", {"request": {"prompt": "a|b"}}))
    calls = TokenizerCalls(client, ["m", "m|2"])
    call = await take(calls)
    assert (call.kind, unpack(call.body)) == ("count", {"request": {"prompt": "a|b"}})
    calls.answer(call, pack({"result": {"count": 3}}))
    assert await asked == {"count": 3}
    assert client.keys("*") == []


async def test_a_call_with_a_shorter_timeout_does_not_expire_earlier_ones(
    client: "redis.Redis", asking: "redis.asyncio.Redis"
) -> None:
    asked = asyncio.create_task(TokenizerClient(asking).call("m", "count", {}))
    while not client.llen(key := tokenizer_calls_key("m")):
        await asyncio.sleep(0)
    assert 0 < client.pttl(key) <= 1000 * ANSWER_SECONDS
    client.persist(key)  # so that only the second call sets its expiry
    short = asyncio.create_task(TokenizerClient(asking, seconds=ANSWER_SECONDS / 2).call("m", "count", {}))
    while client.llen(key) < 2:
        await asyncio.sleep(0)
    assert 1000 * ANSWER_SECONDS / 2 < client.pttl(key) <= 1000 * ANSWER_SECONDS
    calls = TokenizerCalls(client, ["m"])
    calls.answer(await take(calls), pack({"result": {"count": 3}}))
    assert await asked == {"count": 3}
    short.cancel()
    await asyncio.gather(short, return_exceptions=True)


async def test_a_refusal_is_raised_with_its_code(client: "redis.Redis", asking: "redis.asyncio.Redis") -> None:
    asked = asyncio.create_task(TokenizerClient(asking).call("m", "detokenize", {"tokens": []}))
    calls = TokenizerCalls(client, ["m"])
    calls.answer(await take(calls), pack({"error": {"code": "unsupported", "message": "no"}}))
    with pytest.raises(TokenizerCallError, match="no") as raised:
        await asked
    assert raised.value.code == "unsupported"


async def test_an_unanswered_call_times_out(asking: "redis.asyncio.Redis") -> None:
    tokenizer = TokenizerClient(asking, seconds=0.05)
    with pytest.raises(TokenizerCallError, match=r"no worker of m answered within 0\.05 s") as raised:
        await tokenizer.call("m", "count", {})
    assert raised.value.code == "tokenizer_unavailable"


async def test_an_expired_call_is_not_taken(client: "redis.Redis", asking: "redis.asyncio.Redis") -> None:
    calls, key = TokenizerCalls(client, ["m"]), tokenizer_calls_key("m")
    asked = asyncio.create_task(TokenizerClient(asking).call("m", "count", {}))
    while (call := client.lpop(key)) is None:
        await asyncio.sleep(0)
    seconds, _ = client.time()
    for ends, taken in ((1000 * seconds - 1, False), (1000 * seconds + 60_000, True)):
        client.rpush(key, b"%d|%b" % (ends, call.split(b"|", 1)[1]))
        assert (calls.take(1.0) is not None) == taken
    asked.cancel()  # with a reply of Redis that it has not read
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(ANSWER_SECONDS / 2):
            await asked


async def test_the_number_of_waiting_calls_is_limited(client: "redis.Redis", asking: "redis.asyncio.Redis") -> None:
    tokenizers = [TokenizerClient(asking) for _ in range(MAX_WAITING_CALLS // MAX_CALLS_PER_CLIENT)]
    keys = [str(number // MAX_CALLS_PER_KEY) for number in range(MAX_CALLS_PER_CLIENT)]
    waiting = [asyncio.create_task(each.call("m", "count", {}, key=key)) for each in tokenizers for key in keys]
    while client.llen(tokenizer_calls_key("m")) < MAX_WAITING_CALLS:
        await asyncio.sleep(0)
    with pytest.raises(TokenizerCallError, match="64 tokenizer calls") as raised:
        await TokenizerClient(asking).call("m", "count", {})
    assert raised.value.code == "tokenizer_unavailable"
    one_more = asyncio.create_task(tokenizers[0].call("m", "count", {}))  # waits in the client's memory
    calls = TokenizerCalls(client, ["m"])
    for number in range(MAX_WAITING_CALLS + 1):
        calls.answer(await take(calls), pack({"result": {"count": number}}))
    assert {answer["count"] for answer in await asyncio.gather(*waiting, one_more)} == set(range(MAX_WAITING_CALLS + 1))


@pytest.mark.parametrize("item", [b"", b"|||", b"x|y|count|z", b"99999999999999|y|steal|z", b"1|y|count|z", b"\xff"])
def test_malformed_and_expired_calls_are_skipped(client: "redis.Redis", item: bytes) -> None:
    client.rpush(tokenizer_calls_key("m"), item)
    assert TokenizerCalls(client, ["m"]).take(1.0) is None
    assert not client.exists(tokenizer_calls_key("m"))


def test_an_answer_and_its_expiry_are_written_together(client: "redis.Redis") -> None:
    client.config_resetstat()
    TokenizerCalls(client, ["m"]).answer(TokenizerCall("a", "count", b""), pack({"result": {"count": 3}}))
    assert client.info("commandstats")["cmdstat_exec"]["calls"] == 1
    assert client.pttl(tokenizer_answer_key("a")) > 0
