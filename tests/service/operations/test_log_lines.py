"""The log of a real worker: its level can change while it runs, and its lines have the fields of their request."""

import sys
import uuid
from collections.abc import Callable
from pathlib import Path

from click.testing import CliRunner, Result

from headrace_broker.streams.writer import StreamWrite, StreamWriter
from headrace_cli.commands.control import control
from service.workers.conftest import make_service, model_folder
from service.workers.service import DEADLINE, Service

__all__ = ["make_service", "model_folder"]


def set_level(service: Service, level: str) -> Result:
    return CliRunner().invoke(control, ["log-level", "--level", level, "--redis-url", service.server.url])


def test_the_level_can_change_and_lines_have_the_requests_fields(make_service: Callable[..., Service]) -> None:
    service = make_service()
    worker = service.start_worker().wait_ready()
    assert "log level WARNING, was INFO" in set_level(service, "WARNING").output

    resumed = uuid.uuid4().hex  # a request that another worker started
    writer = StreamWriter(service.client, 60)
    attempt = writer.claim(resumed, "a worker that died").attempt
    writer.publish([StreamWrite.chunk(resumed, attempt, 1, index=0, token_ids=[5], text="a")])

    def send(request_id: str) -> None:
        params = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True}
        service.send({"prompt": "Zanzibar", "sampling_params": params}, task_id=request_id)
        service.wait_ended([request_id])
        service.wait_settled()

    def lines(request_id: str) -> list[dict[str, object]]:
        return [line for line in worker.log_lines() if request_id in str(line)]

    quiet = uuid.uuid4().hex
    send(quiet)
    assert lines(quiet) == []

    changed = set_level(service, "debug")
    assert changed.exit_code == 0, changed.output
    assert "log level DEBUG, was WARNING" in changed.output
    send(resumed)
    about = lines(resumed)
    assert about, worker.log_text()[-2000:]
    for line in about:
        assert line["request_id"] == resumed, line
        assert str(line["worker"]).startswith("headrace-tiny-"), line
    continued = [line for line in about if line["event"] == "request continues"]
    assert [line["attempt"] for line in continued] == [2]
    assert "Zanzibar" not in worker.log_text()

    set_level(service, "WARNING")
    quiet_again = uuid.uuid4().hex
    send(quiet_again)
    assert [line for line in lines(quiet_again) if line.get("logger", "").startswith("headrace")] == []


def test_celerys_own_log_file_gets_the_lines_and_no_colour_codes(
    make_service: Callable[..., Service], tmp_path: Path
) -> None:
    service = make_service()
    file = tmp_path / "celery.log"
    command = [sys.executable, "-m", "celery", "-A", "headrace_workers.app", "worker", "--logfile", str(file)]
    worker = service.start_worker(command=command, log_json="false")
    service.wait_until(lambda: file.exists() and "engine ready after" in file.read_text(), DEADLINE)
    assert "\x1b[" not in file.read_text() + worker.log_text()
