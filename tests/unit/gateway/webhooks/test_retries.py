"""What follows an attempt to deliver."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_gateway.webhooks.retries import JITTER, LIFE_SECONDS, SCHEDULE, Attempt, Decision, decide

HOUR = 3600.0


FAILURE = Attempt(500)


def after(failed_before: int, attempt: Attempt = FAILURE, *, jitter: float = 0.0, slowed: int = 0) -> Decision:
    return decide(attempt, failed_before=failed_before, slowed_before=slowed, jitter=jitter)


def test_an_event_is_tried_ten_times_in_three_days_and_then_given_up() -> None:
    waits = []
    while (decision := after(len(waits))).outcome == "failed":
        waits.append(decision.after)
    assert waits == [5, 300, 1800, 2 * HOUR, 5 * HOUR, 10 * HOUR, 14 * HOUR, 20 * HOUR, 24 * HOUR]
    assert decision == Decision("given_up")


def test_the_whole_schedule_with_all_its_jitter_is_shorter_than_the_life_of_an_event() -> None:
    assert sum(SCHEDULE) * (1 + JITTER) < LIFE_SECONDS


@given(st.integers(0, 8), st.floats(0, 1))
def test_jitter_adds_at_most_a_fifth_to_a_delay(failed: int, jitter: float) -> None:
    assert SCHEDULE[failed + 1] <= after(failed, jitter=jitter).after <= SCHEDULE[failed + 1] * 1.2


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_success_is_2xx(status: int) -> None:
    assert after(3, Attempt(status)) == Decision("delivered")
    assert after(9, Attempt(status)) == Decision("delivered")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308, 400, 401, 404, 409, 500, 503, None])
def test_everything_else_is_a_failure(status: int | None) -> None:
    assert after(0, Attempt(status)) == Decision("failed", after=5)


def test_410_disables_the_endpoint_and_keeps_its_deliveries() -> None:
    assert after(0, Attempt(410)) == Decision("gone", after=5)
    assert after(9, Attempt(410)).outcome == "gone"


@pytest.mark.parametrize("status", [429, 502, 504])
def test_an_overloaded_receiver_is_paused_for_twice_as_long_each_time(status: int) -> None:
    assert [after(0, Attempt(status), slowed=slowed).pause for slowed in (0, 1, 2, 6, 7, 5000)] == [
        *(5, 10, 20, 320, 600, 600)
    ]
    assert after(0, Attempt(status)).after == 5


@pytest.mark.parametrize("status", [429, 503, 500])
def test_retry_after_pauses_the_endpoint(status: int) -> None:
    assert after(0, Attempt(status, retry_after=120)) == Decision("failed", after=120, pause=120)
    assert after(1, Attempt(status, retry_after=120)).after == 300
    assert after(9, Attempt(status, retry_after=120)) == Decision("given_up", pause=120)


def test_a_pause_lasts_at_most_a_day() -> None:
    assert after(0, Attempt(429, retry_after=10**9)) == Decision("failed", after=86400, pause=86400)
    assert after(0, Attempt(200, retry_after=10**9)) == Decision("delivered")
