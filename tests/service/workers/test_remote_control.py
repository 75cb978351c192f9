"""Celery's remote control and `headrace control` on a running worker."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from headrace_cli.commands.control import control
from headrace_cli.commands.worker import worker
from service.workers.service import DEADLINE, Service, results

LONG = 1500


def run(service: Service, *arguments: str) -> tuple[int, dict[str, Any]]:
    outcome = CliRunner().invoke(control, [*arguments, "--json", "--timeout", "10", "--redis-url", service.server.url])
    return outcome.exit_code, json.loads(outcome.stdout)


def ask(service: Service, command: str, **arguments: Any) -> dict[str, Any]:
    [reply] = service.app.control.broadcast(command, arguments=arguments, reply=True, timeout=60, limit=1)
    [answer] = reply.values()
    return dict(answer)


def test_a_worker_is_inspected_paused_resumed_and_drained(make_service: Callable[..., Service]) -> None:
    service = make_service()
    worker = service.start_worker(max_num_seqs=4).wait_ready()
    running = service.generate("the wheel Zanzibar", max_tokens=LONG)
    service.wait_tokens([running.id], at_least=3)
    [(name, stats)] = service.app.control.broadcast("engine_stats", reply=True, timeout=60, limit=1)[0].items()
    assert stats["state"] == "ready"
    assert (stats["requests"], stats["slots_used"], stats["slots"], stats["leases"]) == (1, 1, 4, 1)
    assert stats["engine"]["pid"] == worker.engine_pid()
    assert "Zanzibar" not in str(stats)

    assert ask(service, "pause") == {"ok": "paused"}
    assert worker.health("ready")[0] == 503
    waiting = service.generate()
    results([running], timeout=DEADLINE)
    assert service.stream(running.id).num_tokens == LONG
    assert ask(service, "engine_stats")["paused"]
    assert service.queued() == 1

    assert ask(service, "resume") == {"ok": "resumed"}
    results([waiting])
    assert worker.health("ready")[0] == 200

    last = service.generate(max_tokens=LONG)
    service.wait_tokens([last.id], at_least=3)
    assert "error" in ask(service, "drain", grace_seconds="soon")
    assert run(service, "drain", "--worker", name) == (0, {name: {"ok": "draining"}})
    assert worker.health("ready")[0] == 503
    assert "error" in ask(service, "resume")
    assert worker.wait() == 0
    worker.assert_nothing_left()
    assert results([last])[last.id]["error"] is None
    assert service.stream(last.id).num_tokens == LONG


def test_a_drain_hands_running_requests_back_after_its_grace_period(make_service: Callable[..., Service]) -> None:
    service = make_service()
    worker = service.start_worker(lease_seconds=60).wait_ready()
    handle = service.generate(max_tokens=2000)
    service.wait_tokens([handle.id], at_least=3)
    assert ask(service, "drain", grace_seconds=0) == {"ok": "draining"}
    assert worker.wait() == 0
    assert (service.queued(), service.leased()) in ((1, 0), (0, 0))


def test_the_workers_own_command_drains_running_workers(
    make_service: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = make_service()
    monkeypatch.setenv("HEADRACE_REDIS_URL", service.server.url)
    nobody = CliRunner().invoke(worker, ["--drain", "--worker", "nobody@nowhere"])
    assert nobody.exit_code == 1
    assert "no worker answered" in nobody.output
    running = service.start_worker(lease_seconds=60).wait_ready()
    handle = service.generate(max_tokens=2000, n=16, temperature=1.0)
    service.wait_tokens([handle.id], at_least=3)
    [name] = service.app.control.broadcast("engine_stats", reply=True, timeout=60, limit=1)[0]
    assert CliRunner().invoke(worker, ["--drain", "--worker", name]).output == f"{name}: draining\n"
    status, body = running.health("ready")
    assert status == 503
    assert "draining" in body
    assert CliRunner().invoke(worker, ["--drain", "--grace-seconds", "0"]).output == f"{name}: draining\n"
    assert running.wait() == 0
    assert (service.queued(), service.leased()) in ((1, 0), (0, 0))


@pytest.mark.parametrize("flags", [["--drain", "--model", "x"], ["--worker", "x"]])
def test_options_to_start_and_to_drain_a_worker_do_not_mix(flags: list[str]) -> None:
    assert CliRunner().invoke(worker, flags).exit_code == 2


def test_a_control_command_that_no_worker_answers_fails(make_service: Callable[..., Service]) -> None:
    service = make_service()
    outcome = CliRunner().invoke(control, ["stats", "--timeout", "0.1", "--redis-url", service.server.url])
    assert outcome.exit_code == 1
    assert "no worker answered" in outcome.output
