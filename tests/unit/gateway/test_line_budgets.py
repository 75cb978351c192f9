"""Lines of a batch whose key has a budget: which of them reserve, and whose reservations are released."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from headrace_broker import GenerateRequest, QueueFullError, QueueUnavailableError, RegisteredModel
from headrace_broker.client.submission import RequestStatus
from headrace_broker.errors import UsedRequestIdError
from headrace_broker.usage.budgets import BudgetDecision
from headrace_gateway.batch.line_request import LineRequests, LineStoppedError
from headrace_gateway.keys.api_key import ANYONE

KEY = replace(ANYONE, name="web", tokens_per_day=100)
MODEL = Mock(spec=RegisteredModel, max_model_len=64)
MODEL.name = "m"
LOST = QueueUnavailableError("redis://127.0.0.1", "submit", ConnectionError("the reply is lost"))
FULL = QueueFullError("m", 1, 1, None)


class Sent:
    """Sends the request `r` of a line with these outcomes, and records what was reserved and released."""

    def __init__(self, outcomes: Sequence[Any], state: str = "pending", key: Any = KEY) -> None:
        decision = BudgetDecision(True, 0, 0, 60, frozenset({"r"}))
        self.client = Mock(
            status=AsyncMock(return_value=RequestStatus(state)),  # type: ignore[arg-type]
            reserve_tokens=AsyncMock(return_value=decision),
            release_tokens=AsyncMock(),
        )
        self.call: Any = Mock(request_ids=["r"], requests=[GenerateRequest("hello")])
        self.call.send = AsyncMock(side_effect=outcomes)
        self.lines = LineRequests(
            self.client, Mock(), Mock(), secret="s", key=key, on_waiting=self.on_waiting, pause=0.0
        )
        self.stops_when_waiting = False

    def on_waiting(self, _: str) -> None:
        self.lines._is_stopped = self.stops_when_waiting

    async def run(self) -> bool:
        return await self.lines._send(self.call, MODEL)

    @property
    def was_released(self) -> bool:
        return bool(self.client.release_tokens.await_count)


async def test_a_request_that_ran_before_is_neither_sent_nor_reserved() -> None:
    for state in ("running", "finished"):
        sent = Sent([], state)
        assert not await sent.run()
        assert sent.client.reserve_tokens.await_count == sent.call.send.await_count == 0


async def test_a_request_that_has_a_budget_reserves_before_it_is_sent() -> None:
    sent = Sent([None])
    assert await sent.run()
    assert sent.client.reserve_tokens.await_count == 1
    assert not sent.was_released


async def test_a_key_without_a_budget_asks_nothing() -> None:
    sent = Sent([None], key=ANYONE)
    assert await sent.run()
    assert sent.client.status.await_count == sent.client.reserve_tokens.await_count == 0


async def test_a_request_that_another_holder_has_sent_releases_its_reservation() -> None:
    sent = Sent([FULL, UsedRequestIdError("r")])
    assert not await sent.run()
    assert sent.was_released


async def test_a_request_whose_reply_was_lost_keeps_its_reservation() -> None:
    sent = Sent([LOST, UsedRequestIdError("r")])
    assert not await sent.run()
    assert not sent.was_released


@pytest.mark.parametrize(("outcome", "is_released"), [(FULL, True), (LOST, False)])
async def test_a_line_that_is_stopped_while_it_waits_releases_what_was_not_sent(
    outcome: Exception, is_released: bool
) -> None:
    sent = Sent([outcome])
    sent.stops_when_waiting = True
    with pytest.raises(LineStoppedError):
        await sent.run()
    assert sent.was_released is is_released
