"""An engine that hangs, or that one request kills, only delays other requests."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from service.workers.service import Service, StreamLog, results

NUM_TOKENS = 300
POISON = [13, 13, 13]

# Every interpreter with this folder on its path loads it. It kills the engine in the poison's first step.
KILLER = """
import sys
if "headrace_engine.core.child" in sys.orig_argv:
    import os
    from headrace_engine.runner.batch import RequestBatch
    update = RequestBatch.update
    def update_or_die(self, batch):
        if any(request.token_ids[:3] == [13, 13, 13] for request in batch.new_requests):
            open({deaths!r}, "a").write("x")
            os._exit(3)
        return update(self, batch)
    RequestBatch.update = update_or_die
"""


@pytest.fixture
def deaths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the engines of workers started from now on die of the poison. The file gets a byte for each death."""
    deaths = tmp_path / "deaths"
    (tmp_path / "sitecustomize.py").write_text(KILLER.replace("{deaths!r}", repr(str(deaths))))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return deaths


def contents(logs: dict[str, StreamLog]) -> list[object]:
    return [log.content for log in logs.values()]


def test_an_engine_that_hangs_is_killed_and_its_requests_continue(make_service: Callable[..., Service]) -> None:
    service = make_service()
    worker = service.start_worker(stall_seconds=5).wait_ready()
    expected = [service.generate(f"the wheel {number}", max_tokens=NUM_TOKENS) for number in range(3)]
    undisturbed = contents(service.wait_ended([handle.id for handle in expected]))
    handles = [service.generate(f"the wheel {number}", max_tokens=NUM_TOKENS) for number in range(3)]
    service.wait_tokens([handle.id for handle in handles], at_least=1)
    os.kill(worker.engine_pid(), signal.SIGSTOP)
    logs = service.wait_ended([handle.id for handle in handles])
    assert contents(logs) == undisturbed
    assert all(len(log.attempts) == 1 for log in logs.values())
    assert worker.metrics()['headrace_engine_restarts_total{reason="stall"}'] >= 1
    assert all(result["error"] is None for result in results(handles).values())


@pytest.mark.usefixtures("deaths")
def test_a_request_that_kills_every_engine_is_a_dead_letter_and_the_others_are_answered(
    make_service: Callable[..., Service],
) -> None:
    service = make_service()
    service.start_worker().wait_ready()
    expected = service.generate(max_tokens=NUM_TOKENS)
    undisturbed = contents(service.wait_ended([expected.id]))
    neighbours = [service.generate(max_tokens=NUM_TOKENS) for _ in range(2)]
    poison = service.send({"prompt_token_ids": POISON})
    assert poison.get(timeout=120)["error"]["code"] == "dead_letter"
    logs = service.wait_ended([handle.id for handle in neighbours], timeout=120)
    assert contents(logs) == undisturbed * 2
    log = service.wait_ended([poison.id])[poison.id]
    assert log.end is not None
    assert log.end["error"]["code"] == "dead_letter"
    service.wait_settled()
    [letter] = service.dead_letters()
    assert letter[b"reason"].startswith(b"poison: the engine process")


def test_a_request_that_kills_the_engines_of_two_workers_kills_three_of_them_in_all(
    make_service: Callable[..., Service], deaths: Path
) -> None:
    service = make_service()
    first = service.start_worker(lease_seconds=2).wait_ready()
    neighbour = service.generate(max_tokens=2 * NUM_TOKENS)
    service.wait_tokens([neighbour.id], at_least=1)
    poison = service.send({"prompt_token_ids": POISON})
    service.wait_until(lambda: service.client.exists(f"headrace:losses:{poison.id}"), timeout=120)
    first.kill()
    service.start_worker(lease_seconds=2)
    assert poison.get(timeout=150)["error"]["code"] == "dead_letter"
    assert results([neighbour])[neighbour.id]["error"] is None
    assert len(deaths.read_text()) == 3
    service.wait_settled()
