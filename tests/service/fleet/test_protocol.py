"""A few seeded schedules of `make fleet-protocol`: leases on one server, streams on another, and faults in between."""

import logging
from collections.abc import Iterator

import pytest

from fleet.protocol import Clients, run_variant, three_servers
from fleet.protocol_schedule import MUTATIONS, VARIANTS, run_schedule

SCHEDULES = range(10)
MOST_SCHEDULES = 60


@pytest.fixture(scope="module")
def clients() -> Iterator[Clients]:
    with three_servers() as clients:
        yield clients


@pytest.fixture(autouse=True)
def _silent_leases(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "headrace_broker")


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in MUTATIONS])
def test_lost_late_and_overtaken_calls_break_no_stream(clients: Clients, variant: str) -> None:
    row = run_variant(variant, SCHEDULES, clients)
    assert row.problem is None
    assert row.counts["messages lost"] > 0
    assert row.counts["messages delayed by 5 s or more"] > 0
    assert row.counts["crashes"] > 0
    assert row.counts["calls refused"] > 0
    assert row.counts["table changes"] > 0


@pytest.mark.parametrize("variant", MUTATIONS)
def test_the_schedules_find_a_fault_of_the_protocol(clients: Clients, variant: str) -> None:
    outcomes = (run_schedule(seed, VARIANTS[variant], *clients) for seed in range(MOST_SCHEDULES))
    assert not all(outcome.is_good for outcome in outcomes)
