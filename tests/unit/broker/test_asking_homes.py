"""Which faults of a stream server a call ignores that may be left out there."""

import asyncio

import pytest
import redis

from headrace_broker.errors import SettingsError
from headrace_broker.server.asking_homes import unless_away, unless_away_async
from headrace_broker.server.stream_table import MAIN

FAULTS = [
    redis.ConnectionError(),
    redis.TimeoutError(),
    redis.exceptions.ReadOnlyError(),
    redis.ResponseError("MISCONF"),
    SettingsError("leads to another server"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_faults_of_a_stream_server_are_ignored_and_those_of_the_main_server_are_not(fault: Exception) -> None:
    with unless_away("s1"):
        raise fault
    with pytest.raises(type(fault)), unless_away(MAIN):
        raise fault


def test_a_missing_right_is_never_ignored() -> None:
    with pytest.raises(redis.exceptions.NoPermissionError), unless_away("s1"):
        raise redis.exceptions.NoPermissionError


async def test_a_stream_server_that_hangs_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_broker.server.asking_homes.OTHER_TIMEOUT", 0.01)
    async with unless_away_async("s1"):
        await asyncio.Event().wait()
