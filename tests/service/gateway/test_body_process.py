"""Large bodies are parsed in a process of their own, with the same outcome as small ones."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import pytest

from headrace_gateway.chat.fields import read_chat
from headrace_gateway.errors import ApiError, invalid
from headrace_gateway.keys.api_key import ANYONE
from headrace_gateway.requests import body_process
from headrace_gateway.requests.body import SMALL_BYTES, Body
from headrace_gateway.requests.body_process import BodyProcess


@pytest.fixture
async def bodies() -> AsyncIterator[BodyProcess]:
    bodies = BodyProcess()
    yield bodies
    await bodies.aclose()


def encoded(size: int, **fields: Any) -> bytes:
    return json.dumps(fields | {"padding": " " * size}).encode()


def pid_of(_body: dict[str, Any]) -> int:
    return os.getpid()


def refuse(body: dict[str, Any]) -> None:
    raise invalid("refused", code="unsupported", param=f"messages[{len(body)}]")


def fail(body: dict[str, Any]) -> None:
    raise KeyError(body["secret"])


def kill(_body: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def read_tiny(body: dict[str, Any]) -> Any:
    return read_chat({name: value for name, value in body.items() if name != "padding"}, model=None, lora=None)


async def test_only_large_bodies_leave_the_process(bodies: BodyProcess) -> None:
    assert await Body(encoded(9), bodies, ANYONE).read(pid_of) == os.getpid()
    assert await Body(encoded(SMALL_BYTES), bodies, ANYONE).read(pid_of) != os.getpid()


@pytest.mark.parametrize("size", [0, SMALL_BYTES])
async def test_calls_and_refusals_are_the_same_at_any_size(bodies: BodyProcess, size: int) -> None:
    fields = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    body = Body(encoded(size, **fields), bodies, ANYONE)
    assert await body.read(read_tiny) == read_tiny(fields)
    with pytest.raises(ApiError) as raised:
        await body.read(refuse)
    error = raised.value
    assert (error.status, error.code, error.message, error.param) == (400, "unsupported", "refused", "messages[3]")
    with pytest.raises(ApiError, match="not valid JSON"):
        await Body(b"{" + b" " * size, bodies, ANYONE).read(pid_of)


async def test_the_log_says_where_an_unexpected_error_came_from_and_does_not_quote_the_body(
    bodies: BodyProcess, caplog: pytest.LogCaptureFixture
) -> None:
    body = Body(encoded(SMALL_BYTES, secret="swordfish"), bodies, ANYONE)
    with pytest.raises(RuntimeError, match="KeyError") as raised:
        await body.read(fail)
    assert "in fail" in caplog.text
    assert "KeyError" in caplog.text
    assert "swordfish" not in str(raised.value) + caplog.text


async def test_a_process_that_dies_fails_one_body_and_is_replaced(bodies: BodyProcess) -> None:
    body = Body(encoded(SMALL_BYTES), bodies, ANYONE)
    with pytest.raises(ApiError) as raised:
        await body.read(kill)
    assert raised.value.status == 500
    assert await body.read(pid_of) != os.getpid()


async def test_after_a_body_its_owner_waits_twice_as_long_and_others_do_not(bodies: BodyProcess) -> None:
    async with bodies.turn("a"):
        await asyncio.sleep(0.05)
        ended = time.monotonic()
    waiting = asyncio.create_task(wait_for_turn(bodies, "a"))
    await wait_for_turn(bodies, "b")
    assert not waiting.done() or time.monotonic() - ended > 0.09
    assert await waiting - ended > 0.09


async def test_a_turn_that_waited_for_redis_delays_the_next_by_a_second_at_most(
    bodies: BodyProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 3600.0])
    with monkeypatch.context() as patched:
        patched.setattr(body_process, "time", Mock(monotonic=lambda: next(clock)))
        async with bodies.turn("a"):
            pass
    await asyncio.wait_for(wait_for_turn(bodies, "a"), 60)


async def wait_for_turn(bodies: BodyProcess, owner: str) -> float:
    async with bodies.turn(owner):
        return time.monotonic()
