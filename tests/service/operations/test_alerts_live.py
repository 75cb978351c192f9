"""Alerts against real faults: each fires for the fault that it is named after, and no alert fires before.

The tests take minutes, because alerts wait on purpose: run them by `make check-ops`. In every run promtool tests when
each rule fires.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from celery.result import AsyncResult

from service.operations.conftest import Watched
from service.operations.prometheus import prometheus_or_skip
from service.servers import make_server
from service.workers.conftest import model_folder
from service.workers.service import QUEUE, Service

__all__ = ["model_folder"]

pytestmark = [
    pytest.mark.skipif(not os.environ.get("HEADRACE_CHECK_OPS"), reason="takes minutes: run by make check-ops"),
    pytest.mark.timeout(900),
]

# Far longer than the rules need, because a busy machine must not fail a test; the time taken is printed.
LONGEST_SECONDS = 240.0
# Requests that always wait, so that another one takes the blocks of each that ends.
NUM_WAITING = 50


@pytest.fixture
def make_own(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Watched]]:
    """Return a function that makes a service for this test alone, which injects faults. Its load raises no alert."""
    prometheus_or_skip()
    with ExitStack() as stack:

        def make(**settings: Any) -> Watched:
            server = stack.enter_context(make_server())
            service = Service(server, model_folder, tmp_path_factory.mktemp("own"))
            stack.callback(service.close)
            settings = {"stall_seconds": 600, **settings}
            found = Watched(service, tmp_path_factory.mktemp("prometheus"), stack, **settings)
            found.prometheus.wait_until(lambda: len(found.prometheus.query("headrace_requests_total")) > 0)
            found.load()
            assert found.prometheus.firing() == set()
            return found

        yield make


@pytest.fixture
def own(make_own: Callable[..., Watched]) -> Watched:
    return make_own()


WaitFires = Callable[..., None]


@pytest.fixture
def wait_fires(capsys: pytest.CaptureFixture[str]) -> WaitFires:
    """Return a function that waits until an alert fires. It calls `meanwhile` repeatedly, to keep the fault up."""

    def wait(watched: Watched, alert: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        def fires() -> bool:
            meanwhile()
            return alert in watched.prometheus.firing()

        started = time.monotonic()
        watched.prometheus.wait_until(fires, LONGEST_SECONDS)
        with capsys.disabled():
            print(f"\n{alert} fired {time.monotonic() - started:.0f} s after the fault")  # noqa: T201

    return wait


def test_a_frozen_engine_is_reported(make_own: Callable[..., Watched], wait_fires: WaitFires) -> None:
    own = make_own(stall_seconds=200)  # then the engine is killed; the alert fires after half of it
    handle = own.service.generate(max_tokens=2000)
    own.service.wait_tokens([handle.id], at_least=1)
    engine = own.worker.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    try:
        wait_fires(own, "HeadraceEngineStalled")
    finally:
        os.kill(engine, signal.SIGCONT)
    handle.revoke(terminate=True)
    own.prometheus.wait_until(lambda: "HeadraceEngineStalled" not in own.prometheus.firing(), LONGEST_SECONDS)


def test_a_dead_letter_a_lost_redis_and_a_killed_worker_are_reported(own: Watched, wait_fires: WaitFires) -> None:
    own.service.client.lpush(QUEUE, b"no message at all")
    wait_fires(own, "HeadraceDeadLetters")
    own.service.server.kill()
    wait_fires(own, "HeadraceRedisDown")
    own.service.server.start()
    own.prometheus.wait_until(lambda: "HeadraceRedisDown" not in own.prometheus.firing(), LONGEST_SECONDS)
    own.worker.kill()
    wait_fires(own, "HeadraceWorkerUnreachable")
    own.service.generate()
    wait_fires(own, "HeadraceNoReadyWorker")


def test_a_full_kv_cache_is_reported(make_own: Callable[..., Watched], wait_fires: WaitFires) -> None:
    # A few of these requests fill 2 MiB. The rule waits for ten minutes, twice: too long for a test.
    own = make_own(kv_cache_memory="2MiB", shortened={"10m": "20s"})
    handles: dict[str, AsyncResult] = {}

    def send_more() -> None:
        for _ in range(own.service.queued(), NUM_WAITING):
            handle = own.service.generate(max_tokens=1900)
            handles[handle.id] = handle

    wait_fires(own, "HeadraceKVCachePressure", meanwhile=send_more)
    own.service.app.control.revoke(list(handles), terminate=True)
    own.prometheus.wait_until(lambda: "HeadraceKVCachePressure" not in own.prometheus.firing(), LONGEST_SECONDS)
    own.load()
