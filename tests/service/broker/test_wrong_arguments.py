"""Wrong arguments raise one of our errors, with a message that says what is wrong, before anything is sent."""

import math
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Final

import pytest
import redis

from headrace_broker.client.async_client import AsyncClient
from headrace_broker.client.client import Client
from headrace_broker.errors import HeadraceBrokerError, InvalidRequestError, QueueUnavailableError, SettingsError
from headrace_broker.keys import LOADING_KEY, MODELS_KEY, dead_letters_key
from headrace_broker.server.embedded import EmbeddedServer
from headrace_broker.streams.events import ChunkEvent, EndEvent, StartEvent
from headrace_broker.streams.writer import StreamWrite, StreamWriter

ODD: Final[tuple[Any, ...]] = (
    0,
    1.5,
    True,
    b"x",
    [],
    {},
    object(),
    math.nan,
    10**400,
    -1,
    "",
    "\ud800",
    {"a": 1},
    (1,),
)
TOO_LONG: Final = "x" * 600

CALLS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "request_id of status": lambda client, odd: client.status(odd),
    "request_id of cancel": lambda client, odd: client.cancel(odd),
    "request_id of is_known": lambda client, odd: client.is_known(odd),
    "request_id of result": lambda client, odd: client.result(odd, timeout=0),
    "request_id of stream": lambda client, odd: client.stream(odd, timeout=0),
    "request_id of submit": lambda client, odd: client.submit("x", request_id=odd),
    "request_ids": lambda client, odd: client.events_many([odd], timeout=0),
    "last_id": lambda client, odd: client.stream("r", last_id=odd, timeout=0),
    "last_ids": lambda client, odd: client.events_many({"r": odd}, timeout=0),
    "model of submit": lambda client, odd: client.submit("x", model=odd),
    "model of purge_queue": lambda client, odd: client.purge_queue(odd),
    "requests": lambda client, odd: client.submit_many([odd]),
    "letters of requeue": lambda client, odd: client.requeue_dead_letters([odd]),
    "letters of purge": lambda client, odd: client.purge_dead_letters([odd]),
    "tenant": lambda client, odd: client.submit("x", tenant=odd),
    "idempotency_key": lambda client, odd: client.submit("x", idempotency_key=odd),
    "messages": lambda client, odd: client.submit(messages=[odd]),
    "sampling_params": lambda client, odd: client.submit("x", {"seed": 1, "stop": odd, "nosuch": odd}),
}
NUMBERS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "timeout of result": lambda client, odd: client.result("r", timeout=odd),
    "timeout of stream": lambda client, odd: client.stream("r", timeout=odd),
    "timeout of events_many": lambda client, odd: client.events_many(["r"], timeout=odd),
    "priority": lambda client, odd: client.submit("x", priority=odd),
    "expires": lambda client, odd: client.submit("x", expires=odd),
    "abandon_after": lambda client, odd: client.submit("x", abandon_after=odd),
    "limit": lambda client, odd: client.dead_letters(odd),
}
ODD_NUMBERS: Final[tuple[Any, ...]] = (True, "5", b"5", [], {}, object(), math.nan, math.inf, 10**400, -1, -0.5, "")


@pytest.fixture
def client(redis_server: EmbeddedServer) -> Iterator[Client]:
    with Client(redis_server.url, model="m") as client:
        yield client


def cases() -> list[Any]:
    words = [
        pytest.param(call, odd, id=f"{name}: {odd!r:.20}")
        for name, call in CALLS.items()
        for odd in (*ODD, TOO_LONG)
        if not (
            name == "request_id of submit" and odd in (0, -1) and odd is not True
        )  # an integer is converted to a string
    ]
    return words + [
        pytest.param(call, odd, id=f"{name}: {odd!r:.20}") for name, call in NUMBERS.items() for odd in ODD_NUMBERS
    ]


@pytest.mark.parametrize(("call", "odd"), cases())
def test_a_wrong_argument_is_refused_before_anything_is_sent(
    client: Client, redis_client: "redis.Redis", call: Callable[[Any, Any], Any], odd: Any
) -> None:
    with pytest.raises(InvalidRequestError, match=r"must|unknown|required"):
        list(call(client, odd))
    assert redis_client.dbsize() == 0


@pytest.mark.parametrize("call", list(CALLS.values()), ids=list(CALLS))
async def test_a_wrong_argument_is_refused_by_the_asyncio_client(
    redis_server: EmbeddedServer, call: Callable[[Any, Any], Any]
) -> None:
    async with AsyncClient(redis_server.url, model="m") as client:
        answer = call(client, 1.5)
        with pytest.raises(HeadraceBrokerError, match=r"must|unknown|required"):
            await (anext(answer) if hasattr(answer, "__anext__") else answer)


@pytest.mark.parametrize("odd", [None, 5, b"x", "r1"])
def test_values_that_are_not_lists_are_refused(client: Client, odd: Any) -> None:
    calls = [client.submit_many, client.requeue_dead_letters, client.purge_dead_letters]
    for call in calls if odd == "r1" else [*calls, lambda odd: list(client.events_many(odd))]:
        with pytest.raises(InvalidRequestError, match="must be a list"):
            call(odd)


@pytest.mark.parametrize("odd", [5, b"redis://x", ["redis://x"], {}])
def test_a_broker_that_is_not_a_url_is_refused(odd: Any) -> None:
    with pytest.raises(SettingsError, match="broker must be a Redis URL"):
        Client(odd)


@pytest.mark.parametrize("last_id", ["18446744073709551616-0", "0-18446744073709551616", "9" * 20 + "-1"])
def test_an_entry_id_beyond_64_bits_is_refused_with_the_limit(client: Client, last_id: str) -> None:
    with pytest.raises(InvalidRequestError, match="at most 18446744073709551615"):
        next(client.stream("r", last_id=last_id))


@pytest.mark.parametrize(
    "last_id", ["", "1", "1-", "-1", "1-2-3", "a-b", "$", ">", "+", "1-\u0663", "9" * 21 + "-0", " 1-0"]
)
def test_a_malformed_entry_id_is_refused(client: Client, last_id: str) -> None:
    with pytest.raises(InvalidRequestError, match="last_id must be an entry id such as 1-17"):
        next(client.stream("r", last_id=last_id))


@pytest.mark.parametrize("beginning", [None, "0-0", "00-000"])
def test_without_last_id_a_stream_is_read_from_its_beginning(
    client: Client, redis_client: "redis.Redis", beginning: str | None
) -> None:
    writer = StreamWriter(redis_client, 60)
    writer.claim("r", "w")
    writer.publish([StreamWrite.chunk("r", 1, 1, index=0, token_ids=[5], text="a")])
    writer.publish([StreamWrite.end("r", 1, 1, finish_reason="stop")])
    kinds = [StartEvent, ChunkEvent, EndEvent]
    assert [type(event) for event in client.events("r", last_id=beginning)] == kinds
    assert [type(event) for _, event in client.events_many({"r": beginning})] == kinds
    assert list(client.stream("r", last_id="18446744073709551615-18446744073709551615")) == []


def test_none_counts_as_not_given(client: Client) -> None:
    left_out = dict.fromkeys(
        ("priority", "expires", "tenant", "request_id", "model", "abandon_after", "idempotency_key")
    )
    assert client.submit("x", **left_out)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "moment", [datetime.min, datetime.max, datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)]
)
def test_a_deadline_too_far_from_now_is_refused(client: Client, moment: datetime) -> None:
    with pytest.raises(InvalidRequestError, match="expires must"):
        client.submit("x", expires=moment)


def test_a_refusal_by_the_server_is_not_reported_as_unavailable(client: Client, redis_client: "redis.Redis") -> None:
    redis_client.set(dead_letters_key("headrace.m"), "x")
    with pytest.raises(QueueUnavailableError, match=r"refused .*WRONGTYPE"):
        client.dead_letters()


def test_a_registry_key_of_another_type_stops_no_client(client: Client, redis_client: "redis.Redis") -> None:
    redis_client.set(MODELS_KEY, "x")
    redis_client.set(LOADING_KEY, "x")
    assert client.models() == client.loading_models() == {}
    assert client.submit("x")
