"""When a line of a batch is due and expires, however long it waits until it is sent."""

import json
from collections.abc import Iterable
from typing import Any

from headrace_broker import SubmitRequest
from headrace_broker.client.submission import Submission, prepare
from headrace_gateway.batch.line import read_call, read_line
from headrace_gateway.batch.line_call import line_call
from headrace_gateway.keys.api_key import ANYONE
from unit.gateway.bodies import CHAT, model


class Clock:
    """The time of the client and of the line, in Unix seconds."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self.sent: list[Submission] = []

    async def submit_many(self, requests: Iterable[SubmitRequest]) -> None:
        self.sent += [prepare(request, default_model=None, now=lambda: self.now) for request in requests]


def call_of(clock: Clock, *, due: float, deadline: float) -> Any:
    line = read_line(
        json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}).encode()
    )
    checked = read_call(line.raw, model(), None)
    return line_call(
        checked,
        line.api,
        "a",
        "tiny",
        ANYONE,
        deadline=clock.now + deadline,
        due=clock.now + due,
        now=lambda: clock.now,
    )


async def test_a_line_that_waits_and_is_sent_again_keeps_its_due_time_and_its_deadline() -> None:
    clock = Clock()
    began, call = clock.now, call_of(clock, due=600, deadline=3600)
    for _ in range(2):
        clock.now += 200
        await call.send(clock, 0)
    for submission in clock.sent:
        assert submission.expires is not None
        assert submission.headers["due"] == began + 600
        assert submission.expires.timestamp() == began + 3600


async def test_a_line_that_is_overdue_is_sent_all_the_same() -> None:
    clock = Clock()
    await call_of(clock, due=-600, deadline=-300).send(clock, 0)
    assert [submission.headers["due"] for submission in clock.sent] == [clock.now + 1]
