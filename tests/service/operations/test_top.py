"""`headrace top` with a real worker."""

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from headrace_broker.server.embedded import EmbeddedServer
from headrace_cli.commands.top import draw, top
from service.servers import make_server
from service.workers.conftest import model_folder
from service.workers.service import Service

__all__ = ["model_folder"]

pytestmark = pytest.mark.rotated_file

NUM_TOKENS = 60_000


def run(url: str, *flags: str) -> Result:
    return CliRunner().invoke(top, ["--redis-url", url, "--interval", "0.5", *flags], env={"COLUMNS": "160"})


@pytest.fixture(scope="module")
def busy(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A worker with two slots, two requests in them that run longer than all tests, and others that wait."""
    folder = tmp_path_factory.mktemp("top") / Path(model_folder).name
    shutil.copytree(model_folder, folder)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 2 * NUM_TOKENS}))
    with make_server() as server:
        service = Service(server, str(folder), folder.parent)
        try:
            service.start_worker(max_num_seqs=2, kv_cache_memory="512MiB").wait_ready()
            handles = [service.generate("the wheel Zanzibar", max_tokens=NUM_TOKENS) for _ in range(12)]
            service.wait_until(lambda: service.leased() == 2)
            yield service
            for handle in handles:
                handle.revoke(terminate=True)
        finally:
            service.close()


def test_the_report_counts_queues_workers_slots_and_requests(busy: Service) -> None:
    found: dict[str, Any] = {}

    def has_rate() -> bool:
        found.update(json.loads(run(busy.server.url, "--json").output))
        # A worker that was too busy to answer the first of two samples has no rate.
        return any(worker["tokens_per_second"] is not None for worker in found["workers"])

    busy.wait_until(has_rate)
    (queue,) = found["queues"]
    assert (queue["model"], queue["leased"], queue["dead"]) == ("tiny", 2, 0)
    assert queue["ready"] > 0
    (worker,) = found["workers"]
    assert (worker["model"], worker["state"], worker["slots"], worker["slots_used"]) == ("tiny", "ready", 2, 2)
    assert worker["tokens_per_second"] > 0
    assert 0 < worker["kv_cache_usage_ratio"] <= 1
    assert len(found["slowest_requests"]) == 2
    assert all(request["attempt"] == 1 for request in found["slowest_requests"])
    assert "Zanzibar" not in json.dumps(found)


def test_a_table_is_printed_once(busy: Service) -> None:
    result = run(busy.server.url, "--once")
    assert result.exit_code == 0
    for word in ("Queues", "Workers", "Slowest requests", "tiny", "2/2"):
        assert word in result.output, result.output


def test_a_service_without_workers_says_so_and_shows_its_queues(redis_server: EmbeddedServer) -> None:
    found = json.loads(run(redis_server.url, "--json").output)
    assert found == {"queues": [], "workers": [], "slowest_requests": []}
    text = io.StringIO()
    Console(file=text, width=100).print(draw(found))
    assert "No worker answered." in text.getvalue()


def test_an_unavailable_redis_is_an_error_of_ours(tmp_path: Path) -> None:
    result = run("redis://127.0.0.1:1/0", "--json")
    assert type(result.exception).__name__ == "QueueUnavailableError"
