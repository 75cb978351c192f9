"""A model spread over three processes: the default model has three heads of keys and values."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace_engine.errors import EngineDeadError
from headrace_engine.requests.sampling_params import SamplingParams
from vllm_engine.conftest import BENCHMARKS
from vllm_engine.driven_engine import Case, DrivenEngine

RANKS = 3


@pytest.fixture
def ranked(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[DrivenEngine]:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # there may be fewer cores than ranks
    executor = {"enforce_eager": True, "distributed_executor_backend": "mp"}
    engine = DrivenEngine(**{**options, "engine_args": executor, "tensor_parallel_size": RANKS})
    yield engine
    engine.close()


def ranks_of(engine: DrivenEngine) -> list[psutil.Process]:
    found = psutil.Process(engine.process.pid).children(recursive=True)
    return [process for process in found if "resource_tracker" not in " ".join(process.cmdline())]


def steps_until(engine: DrivenEngine, deadline: float) -> None:
    while time.monotonic() < deadline:
        engine.process.get_outputs()


def assert_gone(processes: list[psutil.Process], seconds: float) -> None:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def sampled(**given: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, presence_penalty=0.5, ignore_eos=True, **{"max_tokens": 20, **given})


def test_ranks_generate_and_resume_what_one_process_does(ranked: DrivenEngine, workload: list[dict[str, Any]]) -> None:
    expected = json.loads((BENCHMARKS / "expected_fp32.json").read_text())
    places = [place for place, row in enumerate(workload) if row["prompt_len"] < 200][:3]
    prompts = [workload[place]["prompt_token_ids"] for place in places]
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    answers = ranked.run([Case(prompt, greedy) for prompt in prompts])
    assert [answer.tokens for answer in answers] == [expected[place][:20] for place in places]
    if ranked.process.capabilities.exact_resume == "all":
        (whole,) = ranked.run([Case(prompts[0], sampled())])
        (part,) = ranked.run([Case(prompts[0], sampled(), emitted=whole.tokens[:7])])
        assert part.tokens == whole.tokens[7:]
    # a killed engine takes its ranks along, with the memory that its successor needs
    ranks = ranks_of(ranked)
    assert len(ranks) >= RANKS
    ranked.add(Case(prompts[0], sampled(max_tokens=300)))
    ranked.process.get_outputs()
    ranked.process.kill()
    assert_gone(ranks, 5.0)


def test_the_death_of_a_rank_is_the_death_of_the_engine(ranked: DrivenEngine, workload: list[dict[str, Any]]) -> None:
    ranks = ranks_of(ranked)
    ranked.add(Case(workload[0]["prompt_token_ids"], sampled(max_tokens=800)))
    for _ in range(3):
        ranked.process.get_outputs()
    ranks[-1].send_signal(signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        steps_until(ranked, time.monotonic() + 120)
    ranked.process.kill()
    assert_gone(ranks, 5.0)


def test_no_shared_memory_is_left_that_nobody_maps(ranked: DrivenEngine) -> None:
    before = {path.name for path in Path("/dev/shm").glob("vllm_dist_*")}
    ranked.close()
    assert {path.name for path in Path("/dev/shm").glob("vllm_dist_*")} <= before
