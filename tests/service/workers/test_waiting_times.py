"""Metrics measure how long requests wait, even if the producer does not say when it sent them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from service.clock_skew import ClockSkew
from service.workers.service import Service
from service.workers.test_remote_control import ask

AGE = "headrace_queue_oldest_message_age_seconds"
SUMS = ("headrace_queue_wait_seconds", "headrace_time_to_first_token_seconds", "headrace_request_duration_seconds")


@pytest.mark.parametrize("hours", [-3, 3], ids=["behind", "ahead"])
def test_waiting_times_of_plain_celery_are_measured_whatever_the_workers_clock_says(
    make_service: Callable[..., Service], tmp_path: Path, hours: float
) -> None:
    service = make_service()
    worker = service.start_worker(environ=ClockSkew(tmp_path).environ(hours)).wait_ready()
    ask(service, "pause")
    handles = [service.generate("the wheel"), service.generate("the other wheel")]
    service.wait_until(lambda: worker.metrics()[AGE] > 0)
    assert service.client.llen("headrace.tiny") == 0  # a worker without room sorts messages too
    ask(service, "resume")
    service.wait_ended([handle.id for handle in handles])
    service.wait_settled()
    figures = worker.metrics()
    assert figures['headrace_queue_timed_messages_total{clock="redis"}'] == 2
    assert figures['headrace_queue_timed_messages_total{clock="producer"}'] == 0
    for name in SUMS:
        labels = '{priority="0"}' if name == SUMS[0] else ""
        assert figures[f"{name}_count{labels}"] == 2
        assert 0 < figures[f"{name}_sum{labels}"] < 600
    service.wait_until(lambda: worker.metrics()[AGE] == 0)
