"""The timer of waiting messages with a due time."""

from collections.abc import Callable

from headrace_broker.queue.due_timer import DueTimer


class Loop:
    """Celery's event loop, as far as the timer needs it."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []

    def call_later(self, seconds: float, callback: Callable[[], None]) -> "Timer":
        self.timers.append(Timer(seconds, callback))
        return self.timers[-1]

    def seconds(self) -> list[float]:
        return [timer.seconds for timer in self.timers if not timer.is_cancelled]


class Timer:
    def __init__(self, seconds: float, callback: Callable[[], None]) -> None:
        self.seconds, self.callback, self.is_cancelled = seconds, callback, False

    def cancel(self) -> None:
        self.is_cancelled = True


def test_the_earliest_time_counts() -> None:
    calls: list[None] = []
    loop, timer = Loop(), DueTimer(lambda: calls.append(None))
    timer.set(loop, 50)
    timer.set(loop, 2)
    timer.set(loop, 40)
    assert loop.seconds() == [2]
    loop.timers[-1].callback()
    assert len(calls) == 1
    timer.set(loop, 30)
    assert loop.seconds() == [2, 30]


def test_the_queue_is_looked_at_once_a_second_at_most_and_once_a_minute_at_least() -> None:
    loop = Loop()
    DueTimer(lambda: None).set(loop, 0)
    DueTimer(lambda: None).set(loop, 1e6)
    assert loop.seconds() == [1, 60]
