"""The gateway's Redis user loses the right to a command, or to write a key: nothing is half-written or lost."""

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest
import redis
import redis.asyncio

import headrace_gateway
from headrace_broker.scripts import without_unused
from headrace_broker.server.connections import connect_async
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.server.stream_servers import AsyncStreamServers
from headrace_gateway.answers.envelope import Envelope, EnvelopeStore
from headrace_gateway.answers.response_store import ResponseStore
from headrace_gateway.batch.record import BatchRecord, Committed
from headrace_gateway.batch.store import BatchStore
from headrace_gateway.keys.api_key import ApiKey
from headrace_gateway.keys.limits import RateLimits, StoredBytes
from headrace_gateway.redis.claims import Claims
from headrace_gateway.redis.keys import KEYS
from headrace_gateway.requests.call import ResponseOptions
from headrace_gateway.webhooks.event import Event
from headrace_gateway.webhooks.outbox import Outbox
from service.redis_users import url_of

FOLDER: Final = Path(headrace_gateway.__file__).parent / "redis" / "lua"
KEY: Final = ApiKey("web", requests_per_minute=60, tokens_per_minute=600)
RESPONSE: Final = f"resp_{7:032x}"
BATCH: Final = f"batch_{7:032x}"
Call: TypeAlias = Callable[[], Awaitable[object]]
Step: TypeAlias = Callable[["Site"], Awaitable[object]]


def stored_response() -> Envelope:
    options = ResponseOptions(config={})
    return Envelope(
        id=RESPONSE, request_ids=(RESPONSE,), created=1, model="m", key="web", tenant=None, options=options, expires=600
    )


def record() -> BatchRecord:
    return BatchRecord(
        id=BATCH,
        key="web",
        tenant=None,
        best_priority=0,
        models=None,
        endpoint="/v1/chat/completions",
        input_file_id="file-a",
        completion_window="24h",
        created_at=1,
        expires_at=2,
        metadata=None,
        output_seconds=60,
        secret="s",
    )


class Site:
    """The gateway's stores in Redis."""

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self.claims = Claims(client, "tests")
        self.longer_claims = Claims(client, "tests", seconds=99)
        """Renews for another time than `claims` takes: within a millisecond, the same time would change nothing."""
        envelopes, streams = EnvelopeStore(client, 600), AsyncStreamServers(client, {}, 600)
        self.responses = ResponseStore(client, streams, envelopes, self.claims, 600)
        self.limits = RateLimits(client)
        self.stored = StoredBytes(client, 2**20)
        self.batches = BatchStore(client, streams)
        self.outbox = Outbox(client)

    async def claim(self, claims: Claims | None = None) -> Any:
        """Take the only item that is due."""
        (found,) = await (claims or self.claims).take(1)
        return found


async def nothing(_site: Site) -> None: ...


async def add(site: Site) -> object:
    return await site.claims.add("item")


async def add_and_take(site: Site) -> object:
    await add(site)
    return await site.claim()


async def put_response(site: Site) -> object:
    return await site.responses.put(stored_response(), [{"type": "message"}])


async def create_batch(site: Site) -> object:
    return await site.batches.create(record())


async def take_response(site: Site) -> Any:
    await site.claims.add(RESPONSE)
    await put_response(site)
    return await site.claim()


STEPS: Final[Mapping[str, tuple[Callable[[Site], Awaitable[Any]], Callable[[Site, Any], Awaitable[object]]]]] = {
    "claims_add": (nothing, lambda site, _: site.claims.add("item")),
    "claims_take": (add, lambda site, _: site.claims.take(1)),
    "claims_renew": (add_and_take, lambda site, claim: site.longer_claims.renew([claim])),
    "claims_release": (add_and_take, lambda site, claim: site.claims.finish(claim)),
    "claims_release_all": (add_and_take, lambda site, claim: site.claims.release_all([claim], after=9)),
    "rate_admit": (nothing, lambda site, _: site.limits.admit(KEY)),
    "rate_charge": (nothing, lambda site, _: site.limits.charge("web", 600, "answer", 50)),
    "stored_count": (
        lambda site: site.stored.admit("web", None, "a", 5000, 600),
        lambda site, _: site.stored.admit("web", None, "b", 5000, 600),
    ),
    "response_put": (nothing, lambda site, _: put_response(site)),
    "response_finish": (
        take_response,
        lambda site, claim: site.responses.finish(claim, {"status": "failed", "usage": None}),
    ),
    "batch_create": (nothing, lambda site, _: create_batch(site)),
    "batch_write": (lambda site: batch_claim(site), lambda site, claim: site.batches.commit(claim, "a", Committed())),
    "batch_cancel": (create_batch, lambda site, _: site.batches.cancel(BATCH)),
    "webhooks_put": (nothing, lambda site, _: site.outbox.put(Event("batch.failed", "b", 1, "web", None), "crm")),
}
"""By script: what precedes its call, and its call."""


async def batch_claim(site: Site) -> Any:
    await create_batch(site)
    claim = await site.claim(site.batches.claims)
    assert await site.batches.move(claim, ("validating",), "in_progress")
    return claim


def source(name: str) -> str:
    """Return the text of a script with its preludes, without the functions that it does not use."""
    kind = name.partition("_")[0]
    preludes = [FOLDER / f"{each}_prelude.lua" for each in (kind, "claims" if name == "webhooks_put" else kind)]
    files = {path: path.read_text() for path in (*preludes, FOLDER / f"{name}.lua") if path.exists()}
    return without_unused(name, "".join(files.values()))


def commands_of(name: str) -> list[str]:
    return sorted({command.lower() for command in re.findall(r"redis\.p?call\('(\w+)'", source(name))})


def keys_of(name: str) -> list[str]:
    text = re.sub("--.*", "", source(name))
    return [key.name for key in KEYS if key.parts and re.search(rf"\b({key.name.upper()}|{key.lua_name})\b", text)]


def without(name: str) -> Sequence[str]:
    """Return the rules of a user who may only read the keys of this declaration."""
    patterns = {key.name: re.sub("<[^>]*>", "*", key.pattern) for key in KEYS}
    rest = [each for each in patterns.values() if not fnmatch(patterns[name], each)]
    return ["resetkeys", *(f"~{each}" for each in rest), f"%R~{patterns[name]}"]


CASES: Final = [
    *((name, [f"-{command}"]) for name in STEPS for command in commands_of(name)),
    *((name, without(key)) for name in STEPS for key in keys_of(name)),
]


def contents(client: "redis.Redis") -> dict[bytes, bytes | None]:
    return {key: client.dump(key) for key in client.scan_iter()}


@pytest.fixture
def grant(redis_client: "redis.Redis") -> Iterator[Callable[..., object]]:
    def change(*rules: str) -> object:
        everything = ["reset", "on", ">secret", "~*", "&*", "+@all"]
        return redis_client.execute_command("ACL", "SETUSER", "limited", *everything, *rules)

    change()
    yield change
    redis_client.acl_deluser("limited")


def test_every_script_is_tried() -> None:
    assert set(STEPS) == {path.stem for path in FOLDER.glob("*.lua") if not path.stem.endswith("_prelude")}


@pytest.mark.parametrize(("name", "rules"), [pytest.param(*case, id=f"{case[0]} {case[1][-1]}") for case in CASES])
async def test_a_refused_script_changes_nothing_and_its_repeat_succeeds(
    redis_server: EmbeddedServer, redis_client: "redis.Redis", grant: Callable[..., object], name: str, rules: list[str]
) -> None:
    prepare, call = STEPS[name]
    async with connect_async(url_of(redis_server, "limited")) as client:
        site = Site(client)
        given = await prepare(site)
        before = contents(redis_client)
        grant(*rules)
        with pytest.raises(redis.exceptions.NoPermissionError):
            await call(site, given)
        assert contents(redis_client) == before
        grant()
        await call(site, given)
        assert contents(redis_client) != before
