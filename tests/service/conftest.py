"""A real server for every test that wants one: started once, empty for each test, never a server of the user's."""

from collections.abc import Iterator

import pytest
import redis

from headrace_broker.server.connections import connect
from headrace_broker.server.embedded import EmbeddedServer
from service.servers import make_server


@pytest.fixture(scope="session")
def shared_server() -> Iterator[EmbeddedServer]:
    with make_server() as server:
        yield server


@pytest.fixture
def redis_server(shared_server: EmbeddedServer) -> EmbeddedServer:
    with connect(shared_server.url) as client:
        client.flushall()
    return shared_server


@pytest.fixture
def redis_client(redis_server: EmbeddedServer) -> Iterator["redis.Redis"]:
    with connect(redis_server.url) as client:
        yield client
