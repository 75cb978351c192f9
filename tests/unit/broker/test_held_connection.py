"""`HeldConnection` with a fake pool that counts calls."""

from typing import Any

import pytest
import redis
from redis.exceptions import NoScriptError

from clock import Clock
from headrace_broker.server.cluster import RedirectedError
from headrace_broker.server.held_connection import HELD_SECONDS, HeldConnection


class Pool:
    def __init__(self) -> None:
        self.taken = 0
        self.given_back = 0
        self.disconnected = 0
        self.error: BaseException | None = None

    def get_connection(self) -> "Connection":
        self.taken += 1
        return Connection(self)

    def release(self, _connection: "Connection") -> None:
        self.given_back += 1


class Connection:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def send_command(self, *command: Any) -> None:
        self._command = command

    def disconnect(self) -> None:
        self._pool.disconnected += 1

    def read_response(self) -> Any:
        if self._pool.error is not None:
            raise self._pool.error
        return self._command


class Script:
    sha = "5eed"

    def __call__(self, keys: list[str], args: list[Any]) -> Any:
        return ["loaded", *keys, *args]


class Client:
    def __init__(self) -> None:
        self.connection_pool = Pool()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def held(pool: Pool, clock: Clock) -> HeldConnection:
    client = Client()
    client.connection_pool = pool
    return HeldConnection(client, clock=clock)  # type: ignore[arg-type]


def run(held: HeldConnection) -> Any:
    held.send(Script(), ["a", 1])  # type: ignore[arg-type]
    return held.receive(Script(), ["a", 1])  # type: ignore[arg-type]


def test_consecutive_calls_share_a_connection(held: HeldConnection, pool: Pool) -> None:
    assert [run(held), run(held)] == [("EVALSHA", "5eed", 0, "a", 1)] * 2
    assert (pool.taken, pool.given_back) == (1, 0)


def test_after_a_while_the_connection_returns_to_the_pool(held: HeldConnection, pool: Pool, clock: Clock) -> None:
    run(held)
    clock.now += HELD_SECONDS
    run(held)
    assert (pool.taken, pool.given_back) == (2, 1)


@pytest.mark.parametrize("error", [redis.ConnectionError(), redis.ReadOnlyError(), KeyboardInterrupt()])
def test_an_error_passes_and_no_later_call_reads_a_reply_from_its_connection(
    held: HeldConnection, pool: Pool, error: BaseException
) -> None:
    pool.error = error
    with pytest.raises(type(error)):
        run(held)
    pool.error = None
    run(held)
    assert (pool.taken, pool.given_back, pool.disconnected) == (2, 1, 1)


def test_a_script_unknown_to_the_server_is_loaded(held: HeldConnection, pool: Pool) -> None:
    pool.error = NoScriptError()
    assert run(held) == ["loaded", "a", 1]


def test_a_call_that_was_redirected_is_sent_once_more_over_another_connection(held: HeldConnection, pool: Pool) -> None:
    pool.error = RedirectedError("MOVED 1 other:7000")
    held.send(Script(), ["a"], ["key"])  # type: ignore[arg-type]
    assert held.receive(Script(), ["a"], ["key"]) == ["loaded", "key", "a"]  # type: ignore[arg-type]
    pool.error = None
    run(held)
    assert (pool.taken, pool.given_back, pool.disconnected) == (2, 1, 1)
