"""What a pooling call and a completion do with a reservation if they fail before, in and after the queue."""

from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import redis

from headrace_broker import QueueFullError, QueueUnavailableError
from headrace_gateway import generation
from headrace_gateway.keys.daily_budgets import DailyBudgets
from headrace_gateway.pooling import endpoints

AWAY = redis.ConnectionError("no connection")
LOST = QueueUnavailableError("redis://127.0.0.1", "submit", ConnectionError("the reply is lost"))
FULL = QueueFullError("m", 1, 1, None)

BEFORE_AND_IN_THE_QUEUE = pytest.mark.parametrize(
    ("before", "in_queue", "is_released"),
    [(AWAY, None, True), (None, FULL, True), (None, LOST, False)],
)


def gateway_with(before: Exception | None, submit: Any) -> Any:
    decision = Mock(is_admitted=True, made={"r"})
    client = Mock(
        submit=submit,
        submit_pooling=submit,
        reserve_tokens=AsyncMock(return_value=decision),
        release_tokens=AsyncMock(),
    )
    return Mock(
        budgets=DailyBudgets(client),
        stored=Mock(admit=AsyncMock(side_effect=before), change=AsyncMock()),
        client=client,
        envelopes=Mock(put=AsyncMock(side_effect=before)),
        redis=Mock(delete=AsyncMock()),
    )


@BEFORE_AND_IN_THE_QUEUE
async def test_a_pooling_call_keeps_its_reservation_only_if_it_may_be_queued(
    before: Exception | None, in_queue: Exception | None, is_released: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = gateway_with(before, AsyncMock(side_effect=in_queue))
    monkeypatch.setattr(endpoints, "most_tokens", lambda *_: 1)
    monkeypatch.setattr(endpoints, "encoded_bytes", lambda *_: 1)
    call = Mock(submissions=[Mock(request_id="r", headers={})])
    with pytest.raises(type(before or in_queue)):  # type: ignore[arg-type]
        await endpoints._submit(gateway, Mock(), call, Mock(expires=60), Mock())
    assert bool(gateway.client.release_tokens.await_count) is is_released


@BEFORE_AND_IN_THE_QUEUE
async def test_a_completion_keeps_its_reservation_only_if_it_may_be_queued(
    before: Exception | None, in_queue: Exception | None, is_released: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = gateway_with(before, AsyncMock(side_effect=in_queue))
    envelope = Mock(id="r", request_ids=["r"], due=None, counted_bytes=0)
    monkeypatch.setattr(generation, "Envelope", Mock(of=Mock(return_value=envelope)))
    monkeypatch.setattr(generation, "_counted", AsyncMock(return_value=envelope))
    for name in ("most_tokens", "request_bytes", "bounded_priority"):
        monkeypatch.setattr(generation, name, lambda *_: 1)
    headers = Mock(idempotency_key=None, priority=None, expires=60)
    with pytest.raises(type(before or in_queue)):  # type: ignore[arg-type]
        await generation.submit(gateway, Mock(), Mock(requests=[Mock()]), headers, Mock(prefix="cmpl-"), Mock())
    assert bool(gateway.client.release_tokens.await_count) is is_released
