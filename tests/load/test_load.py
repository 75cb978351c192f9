"""A short form of `make load` that checks nothing that depends on the machine's speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.model import save_chaos_model
from headrace_broker.server.embedded import EmbeddedServer
from load.harness import Harness, Plan
from service.workers.service import Service

PLAN = Plan(requests=150, tokens=12, subscribers=60, step_seconds=0.005, slots=16, ttl_seconds=600)


@pytest.mark.timeout(900)
def test_many_subscribers_of_a_long_queue_are_all_served_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmbeddedServer(environ={}, password=False) as server:
        service = Service(server, save_chaos_model(tmp_path / "tiny"), tmp_path)
        try:
            report = Harness(service, PLAN, tmp_path, monkeypatch.setenv).run()
        finally:
            service.close()
    assert report.problems == []
    assert report.chunks == PLAN.requests * PLAN.tokens
    assert report.publish["entries"] >= report.chunks
    assert report.publisher_us_a_chunk > 0
