"""A model over two processes behind the queue, one of which is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil

from chaos.model import save_chaos_model
from service.servers import make_server
from service.workers.service import ChoiceStream, Service, results
from vllm_engine.driven_engine import DrivenEngine
from vllm_engine.test_queue import PATIENCE

RANKS = 2
REQUESTS: list[dict[str, Any]] = [
    {"prompt": "the wheel", "temperature": 0.0},
    {"prompt": "the mill", "temperature": 1.0, "seed": 7, "n": 2, "presence_penalty": 0.5, "logprobs": 1},
    {"prompt": "the stone", "temperature": 0.9, "seed": 8, "repetition_penalty": 1.1},
]


def ranks_of(engine_pid: int) -> list[psutil.Process]:
    found = psutil.Process(engine_pid).children(recursive=True)
    return [process for process in found if "resource_tracker" not in " ".join(process.cmdline())]


def test_requests_go_on_where_they_were_when_a_rank_is_killed(
    vllm_python: str, engine: DrivenEngine, tmp_path: Path
) -> None:
    sent = REQUESTS if engine.process.capabilities.exact_resume == "all" else REQUESTS[:1]
    with make_server(appendonly=True) as server:
        service = Service(server, save_chaos_model(tmp_path / "tiny", "qwen2"), tmp_path)
        try:
            worker = service.start_worker(
                engine="vllm",
                engine_python=vllm_python,
                engine_args='{"enforce_eager": true}',
                device="auto",
                tensor_parallel_size=RANKS,
                environ={"VLLM_CPU_OMP_THREADS_BIND": "nobind"},  # there may be fewer cores than ranks
            ).wait_ready(PATIENCE)
            undisturbed = [service.generate(max_tokens=1500, **request).id for request in sent]
            expected = contents(service, undisturbed)
            handles = [service.generate(max_tokens=1500, **request) for request in sent]
            service.wait_tokens([handle.id for handle in handles], at_least=20)
            engine_pid = worker.engine_pid()
            ranks = ranks_of(engine_pid)
            assert len(ranks) == RANKS
            assert not any(service.stream(handle.id).end for handle in handles), "nothing runs any more"
            os.kill(ranks[-1].pid, signal.SIGKILL)
            worker.wait_for_log("engine ready after", PATIENCE, count=2)
            assert contents(service, [handle.id for handle in handles]) == expected
            assert all(result["error"] is None for result in results(handles).values())
            assert worker.engine_pid() != engine_pid
            assert not [rank for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]
            assert len(ranks_of(worker.engine_pid())) == RANKS
        finally:
            service.close()


def contents(service: Service, request_ids: list[str]) -> list[dict[int, ChoiceStream]]:
    logs = service.wait_ended(request_ids, PATIENCE)
    return [logs[request_id].content for request_id in request_ids]
