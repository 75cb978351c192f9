"""Workers that cannot continue: the engine cannot restart, or two things fail at once during a drain."""

import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from service.workers.service import Service, assert_result_is_stream, results

LONG = 1500


def send_all(service: Service, count: int = 4) -> list[Any]:
    return [service.generate(f"the wheel {number}", max_tokens=LONG) for number in range(count)]


def test_an_engine_that_cannot_restart_ends_the_worker_which_hands_its_requests_back(
    make_service: Callable[..., Service], model_folder: str, tmp_path: Path
) -> None:
    service = make_service()
    broken = tmp_path / "model"
    shutil.copytree(model_folder, broken)
    worker = service.start_worker(model=str(broken), lease_seconds=60).wait_ready()
    handles = send_all(service)
    service.wait_tokens([handle.id for handle in handles], at_least=3)
    (broken / "model.safetensors").unlink()
    os.kill(worker.engine_pid(), signal.SIGKILL)
    assert worker.wait() == 1
    worker.wait_for_log("the worker stops: model .* cannot be loaded|the worker stops: ")
    worker.assert_nothing_left()
    assert service.leased() == 0
    assert service.queued() == len(handles)

    service.start_worker()
    logs = service.wait_ended([handle.id for handle in handles])
    for request_id, result in results(handles).items():
        assert_result_is_stream(result, logs[request_id])
        assert len(logs[request_id].attempts) == 2
        assert logs[request_id].num_tokens == LONG
    service.wait_settled()


def test_an_engine_that_dies_while_the_worker_drains_costs_no_request(make_service: Callable[..., Service]) -> None:
    service = make_service()
    worker = service.start_worker(lease_seconds=60).wait_ready()
    handles = send_all(service)
    service.wait_tokens([handle.id for handle in handles], at_least=3)
    pid = worker.engine_pid()
    worker.send_signal(signal.SIGTERM)
    service.wait_until(lambda: "draining" in worker.health("ready")[1])
    assert worker.health("ready")[0] == 503
    assert worker.health("live")[0] == 200
    os.kill(pid, signal.SIGKILL)
    assert worker.wait() == 0
    worker.assert_nothing_left()
    assert service.leased() == 0
    ended = [handle for handle in handles if service.stream(handle.id).end is not None]
    assert service.queued() == len(handles) - len(ended)
    assert len(ended) < len(handles)


def test_an_outage_while_the_worker_drains_delays_its_end_by_the_grace_period_at_most(
    make_service: Callable[..., Service],
) -> None:
    service = make_service()
    worker = service.start_worker(grace_seconds=3).wait_ready()
    handles = send_all(service)
    service.wait_tokens([handle.id for handle in handles], at_least=3)
    worker.send_signal(signal.SIGTERM)
    service.wait_until(lambda: "draining" in worker.health("ready")[1])
    service.server.kill()
    assert worker.wait(timeout=60) == 0
    worker.assert_nothing_left()
    service.server.start()


def test_a_worker_that_is_stopped_while_its_model_loads_ends_at_once(make_service: Callable[..., Service]) -> None:
    service = make_service()
    worker = service.start_worker()
    worker.engine_pid()
    worker.wait_for_log("ready\\.")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait() == 0
    worker.assert_nothing_left()


def test_a_metrics_port_in_use_is_named_and_ends_the_worker(make_service: Callable[..., Service]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        worker = make_service().start_worker(metrics_port=port)
        assert worker.wait() == 1
    worker.wait_for_log(f"127.0.0.1:{port}|{port}")
    worker.assert_nothing_left()


def test_celerys_own_command_reports_a_wrong_setting_in_one_line(make_service: Callable[..., Service]) -> None:
    command = [sys.executable, "-m", "celery", "-A", "headrace_workers.app", "worker"]
    worker = make_service().start_worker(command=command, max_num_seqs="many")
    assert worker.wait() == 1
    [sentence] = worker.log_text().strip().splitlines()
    assert sentence.startswith("headrace: HEADRACE_MAX_NUM_SEQS ")


def other_weights(folder: Path) -> None:
    """Replace the weights by those of another revision."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] += 1.0
    written = file.with_suffix(".new")
    save_file(tensors, written, metadata={"format": "pt"})
    written.replace(file)


def test_a_worker_of_another_revision_ends_requests_with_tokens_and_serves_the_rest(
    make_service: Callable[..., Service], model_folder: str, tmp_path: Path
) -> None:
    service = make_service()
    first = service.start_worker(lease_seconds=1).wait_ready()
    [begun] = send_all(service, 1)
    service.wait_tokens([begun.id], at_least=3)
    first.process.kill()
    first.wait()
    revision = tmp_path / "revision"
    shutil.copytree(model_folder, revision)
    other_weights(revision)
    service.start_worker(model=str(revision), lease_seconds=1).wait_ready()
    fresh = service.generate(max_tokens=4)
    logs = service.wait_ended([begun.id, fresh.id])
    for request_id, result in results([begun, fresh]).items():
        assert_result_is_stream(result, logs[request_id])
    end = logs[begun.id].end
    assert end is not None
    assert end["error"]["code"] == "model_changed"
    assert end["usage"]["completion_tokens"] == logs[begun.id].num_tokens >= 3
    assert logs[fresh.id].num_tokens == 4
    service.wait_settled()


def test_model_files_replaced_under_a_worker_end_it_when_its_engine_restarts(
    make_service: Callable[..., Service], model_folder: str, tmp_path: Path
) -> None:
    service = make_service()
    replaced = tmp_path / "model"
    shutil.copytree(model_folder, replaced)
    worker = service.start_worker(model=str(replaced), lease_seconds=60).wait_ready()
    handles = send_all(service, 2)
    service.wait_tokens([handle.id for handle in handles], at_least=3)
    other_weights(replaced)
    os.kill(worker.engine_pid(), signal.SIGKILL)
    assert worker.wait() == 1
    worker.wait_for_log("the model's files were replaced while the worker ran")
    assert service.leased() == 0
    assert service.queued() == len(handles)


def test_damaged_weights_end_the_worker_without_a_retry(
    make_service: Callable[..., Service], model_folder: str, tmp_path: Path
) -> None:
    service = make_service()
    damaged = tmp_path / "model"
    shutil.copytree(model_folder, damaged)
    file = damaged / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    worker = service.start_worker(model=str(damaged))
    assert worker.wait() == 1
    worker.wait_for_log("the worker stops: .*model .* cannot be loaded: SafetensorError")
    assert "engine lost" not in worker.log_text()
