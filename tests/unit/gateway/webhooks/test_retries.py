"""What follows a failed attempt to deliver."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_gateway.webhooks.outbox import JITTER, LIFE_SECONDS, SCHEDULE, Attempt, retry_delay

HOUR = 3600.0


def after(failed_before: int, attempt: Attempt = Attempt(500), *, jitter: float = 0.0) -> float | None:  # noqa: B008
    return retry_delay(attempt, failed_before=failed_before, jitter=jitter)


def test_an_event_is_tried_ten_times_in_three_days_and_then_given_up() -> None:
    assert [after(failed) for failed in range(10)] == [
        *(5, 300, 1800, 2 * HOUR, 5 * HOUR, 10 * HOUR, 14 * HOUR, 20 * HOUR, 24 * HOUR),
        None,
    ]


def test_the_whole_schedule_with_all_its_jitter_is_shorter_than_the_life_of_an_event() -> None:
    assert sum(SCHEDULE) * (1 + JITTER) < LIFE_SECONDS


@given(st.integers(0, 8), st.floats(0, 1))
def test_jitter_adds_at_most_a_fifth_to_a_delay(failed: int, jitter: float) -> None:
    delay = after(failed, jitter=jitter)
    assert delay is not None
    assert SCHEDULE[failed + 1] <= delay <= SCHEDULE[failed + 1] * 1.2


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_success_is_2xx(status: int) -> None:
    assert Attempt(status).is_delivered


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308, 400, 401, 404, 409, 410, 429, 500, 503, None])
def test_everything_else_is_a_failure(status: int | None) -> None:
    assert not Attempt(status).is_delivered


def test_410_gives_the_event_up() -> None:
    assert after(0, Attempt(410)) is None


@pytest.mark.parametrize("status", [429, 503, 500])
def test_the_next_attempt_waits_for_retry_after_and_at_most_a_day(status: int) -> None:
    assert after(0, Attempt(status, retry_after=120)) == 120
    assert after(1, Attempt(status, retry_after=120)) == 300
    assert after(0, Attempt(status, retry_after=10**9)) == 86400
    assert after(9, Attempt(status, retry_after=120)) is None
