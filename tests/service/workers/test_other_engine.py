"""A real worker with an engine of another package: requests, refusals, statistics, and an end without the engine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace_monitoring.step_families import SOURCES
from service.workers import other_engine
from service.workers.service import Service
from service.workers.worker_process import WorkerProcess

TESTS = Path(__file__).parents[2]


@pytest.fixture
def start(make_service: Callable[..., Service], tmp_path: Path) -> Callable[..., tuple[Service, WorkerProcess]]:
    """Start a service whose worker has the other engine, with these `engine_args`."""
    other_engine.install(tmp_path)
    path = os.pathsep.join(filter(None, [str(tmp_path), str(TESTS), os.environ.get("PYTHONPATH", "")]))

    def start(engine_args: dict[str, Any], **settings: object) -> tuple[Service, WorkerProcess]:
        service = make_service()
        engine: dict[str, object] = {"engine": "other", "engine_args": json.dumps(engine_args), "device": "auto"}
        return service, service.start_worker(environ={"PYTHONPATH": path}, **engine, **settings)

    return start


def test_a_worker_serves_what_another_engine_supports_and_refuses_the_rest_by_name(
    start: Callable[..., tuple[Service, WorkerProcess]],
) -> None:
    service, worker = start({}, share_prefix_cache=True)
    worker.wait_ready()
    echo = service.send({"prompt_token_ids": [5, 6, 7], "sampling_params": {"temperature": 0}}, priority=3)
    assert service.wait_ended([echo.id])[echo.id].content[0].token_ids == [5, 6, 7]
    asked = {"logit_bias": {str(token): 1 for token in range(9)}, "bad_words": ["wheel"], "temperature": 3}
    refused = service.send({"prompt": "the wheel", "sampling_params": asked}).get(timeout=60)["error"]
    assert refused["code"] == "invalid_request"
    for sentence in (
        "logit_bias has 9 entries, the engine other takes at most 7",
        "bad_words has 1 entries, which the engine other does not support",
        "temperature must be 0, or 0.01 to 2, with the engine other, got 3",
    ):
        assert sentence in refused["message"]

    metrics = worker.metrics()
    fed = {name for name in SOURCES if any(series.startswith(name) for series in metrics)}
    assert fed == {"headrace_engine_requests"}
    assert metrics["headrace_engine_stall_limit_seconds"] == other_engine.ENGINE.stall_seconds
    info = next(series for series in metrics if series.startswith("headrace_model_info"))
    assert 'engine="other",engine_version="0.1"' in info
    assert worker.log_text().count("weights are of paper") == 1
    [line] = [line for line in worker.log_lines() if line["event"] == "weights are of paper"]
    assert (line["level"], line["logger"]) == ("warning", "other_engine.loader")
    assert any(line["event"].endswith(" s: other 0.1") for line in worker.log_lines())


def test_a_worker_whose_engine_is_not_installed_ends_with_the_install_command(
    start: Callable[..., tuple[Service, WorkerProcess]],
) -> None:
    _, worker = start({"fails_with": "no part"})
    assert worker.wait() == 1
    sentence = (
        f"engine other cannot import its parts with {sys.executable} (ModuleNotFoundError: No module named "
        "'a_package_that_nobody_has'): install them there by pip install other-engine"
    )
    assert sentence in worker.log_text()
    assert "Traceback" not in worker.log_text()
    worker.assert_nothing_left()


def test_a_worker_that_cannot_separate_tenants_says_what_to_set_and_ends(
    start: Callable[..., tuple[Service, WorkerProcess]],
) -> None:
    _, worker = start({})
    assert worker.wait() == 1
    assert "the engine other cannot separate the prefix caches of tenants" in worker.log_text()
    worker.assert_nothing_left()
