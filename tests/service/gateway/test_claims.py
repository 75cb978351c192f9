"""Work that replicas share, on a real server."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis

from headrace_broker.server.connections import connect_async
from headrace_broker.server.embedded import EmbeddedServer
from headrace_gateway.redis.claims import Claim, Claims

DUE = "headrace:gw:work:tests"


@pytest.fixture
async def replicas(redis_server: EmbeddedServer) -> AsyncIterator[tuple[Claims, Claims]]:
    async with connect_async(redis_server.url) as first, connect_async(redis_server.url) as second:
        yield Claims(first, "tests", seconds=30), Claims(second, "tests", seconds=30)


def let_pass(client: "redis.Redis", seconds: float) -> None:
    """Let time pass: make every item due that many seconds earlier."""
    for item, due in client.zrange(DUE, 0, -1, withscores=True):
        client.zadd(DUE, {item: due - seconds * 1000})


async def test_each_item_is_taken_by_one_replica(replicas: tuple[Claims, Claims]) -> None:
    items = {f"item-{number}" for number in range(40)}
    for item in items:
        assert await replicas[0].add(item)
    taken = await asyncio.gather(*(replica.take(3) for replica in replicas * 10))
    claims = [claim for part in taken for claim in part]
    assert {claim.item for claim in claims} == items
    assert len(claims) == 40
    assert len({claim.token for claim in claims}) == 40


async def test_an_existing_item_is_not_added_again(replicas: tuple[Claims, Claims]) -> None:
    first, second = replicas
    assert await first.add("a")
    assert not await second.add("a")
    (claim,) = await first.take(1)
    assert not await second.add("a")
    assert await first.finish(claim)
    assert await second.add("a")


async def test_an_expired_claim_goes_to_another_replica_which_alone_can_finish_it(
    replicas: tuple[Claims, Claims], redis_client: "redis.Redis"
) -> None:
    first, second = replicas
    await first.add("a")
    (before,) = await first.take(1)
    assert await second.take(1) == []
    let_pass(redis_client, 30)
    (after,) = await second.take(1)
    assert after.token > before.token
    assert await first.renew([before]) == {before}
    assert not await first.finish(before)
    assert not await first.release(before)
    assert await second.renew([after]) == set()
    assert await second.finish(after)
    let_pass(redis_client, 60)
    assert await first.take(1) == []


async def test_a_renewed_claim_is_not_lost(replicas: tuple[Claims, Claims], redis_client: "redis.Redis") -> None:
    first, second = replicas
    await first.add("a")
    (claim,) = await first.take(1)
    let_pass(redis_client, 20)
    assert await first.renew([claim]) == set()
    let_pass(redis_client, 20)
    assert await second.take(1) == []


async def test_a_released_item_is_due_later_and_its_old_claim_is_lost(
    replicas: tuple[Claims, Claims], redis_client: "redis.Redis"
) -> None:
    first, second = replicas
    await first.add("a")
    (claim,) = await first.take(1)
    assert await first.release(claim, after=300)
    assert await first.renew([claim]) == {claim}
    assert await second.take(1) == []
    let_pass(redis_client, 300)
    assert [taken.item for taken in await second.take(1)] == ["a"]


async def test_an_item_added_later_is_not_due_before(replicas: tuple[Claims, Claims]) -> None:
    first, _ = replicas
    await first.add("later", after=60)
    await first.add("now")
    assert [claim.item for claim in await first.take(5)] == ["now"]


async def test_a_claim_of_an_item_that_was_finished_and_added_again_is_lost(replicas: tuple[Claims, Claims]) -> None:
    first, _ = replicas
    await first.add("a")
    (old,) = await first.take(1)
    await first.finish(old)
    await first.add("a")
    (new,) = await first.take(1)
    assert await first.renew([old, new, Claim("never", 1)]) == {old, Claim("never", 1)}


async def test_no_token_is_given_twice_if_redis_lost_its_last_second(
    replicas: tuple[Claims, Claims], redis_client: "redis.Redis"
) -> None:
    first, second = replicas
    await first.add("a")
    before = redis_client.hgetall(first.token_key)
    (old,) = await first.take(1)
    redis_client.delete(first.token_key)
    if before:
        redis_client.hset(first.token_key, mapping=before)
    let_pass(redis_client, 30)
    (new,) = await second.take(1)
    assert new.token > old.token
    assert await first.renew([old, new]) == {old}


async def test_tokens_grow_even_if_the_clock_goes_back(
    replicas: tuple[Claims, Claims], redis_client: "redis.Redis"
) -> None:
    first, _ = replicas
    redis_client.hset(first.token_key, "", 8 * 10**15)
    for item in "ab":
        await first.add(item)
    claims = await first.take(2)
    assert [claim.token for claim in claims] == [8 * 10**15 + 1, 8 * 10**15 + 2]
    assert await first.renew(claims) == set()
