"""A short form of `make hostile`, with a fixed seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.model import save_chaos_model
from headrace_broker.server.embedded import EmbeddedServer
from hostile.harness import Harness
from hostile.messages import Generator
from service.workers.service import Service

BATCHES = 3
BATCH = 100


@pytest.mark.timeout(900)
def test_every_hostile_message_is_answered_or_a_dead_letter_and_the_worker_stays(tmp_path: Path) -> None:
    with EmbeddedServer(environ={}) as server:
        service = Service(server, save_chaos_model(tmp_path / "tiny"), tmp_path)
        try:
            service.start_worker().wait_ready()
            harness = Harness(service, seed=20)
            for _ in range(BATCHES):
                harness.run_batch(BATCH)
            harness.finish()
        finally:
            service.close()
    account = harness.account
    assert account.problems == []
    assert account.total == BATCHES * BATCH
    assert account.outcomes["honest"].total() == account.outcomes["honest"]["served"] > 0
    assert len(account.outcomes) > 20, "some kinds are not drawn"


def test_the_same_seed_gives_the_same_messages() -> None:
    timeless = [kind for kind in Generator(5).kinds if kind not in ("far_eta", "expires")]
    assert len(timeless) > 20
    without = ("far_eta", "expires")
    assert Generator(5, without).take(200) == Generator(5, without).take(200)
    assert Generator(5, without).take(200) != Generator(6, without).take(200)
