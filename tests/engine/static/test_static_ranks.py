"""Two processes that share a model generate what one does, end together, and none is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from engine.static.fake_neuron import NeuronOnCPU, fake_backend
from engine.test_parity import references, workload
from engine.tiny_models import TinyModel, generate_greedily
from headrace_engine.core.engine_core import EngineCore
from headrace_engine.errors import ConfigError
from headrace_engine.options.config import EngineConfig
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.requests.request import EngineCoreRequest
from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.runner.static.neuron import Neuron
from headrace_engine.runner.static.runner import StaticPagedRunner
from headrace_engine.runner.static.xla import XLA

pytestmark = pytest.mark.rotated_file("engine/headrace_engine/runner/static")


def config_of(model: TinyModel, **options: Any) -> EngineConfig:
    buckets = {"prefill_buckets": [48], "decode_buckets": [4], "context_buckets": [112]}
    args = {"dtype": "float32", "num_blocks": 30, "max_num_seqs": 4, "max_model_len": 112, "device": "static-cpu"}
    return EngineArgs(model=model.folder, **{**args, **buckets, **options}).create_engine_config()


def other_ranks() -> list[psutil.Process]:
    """Processes of other ranks that this process started. Tests of other processes start ranks at the same time."""
    children = psutil.Process().children()
    return [child for child in children if "headrace_engine.runner.static.worker_rank" in _command(child)]


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:  # it has ended
        return []


@contextmanager
def running(config: EngineConfig, runner: StaticPagedRunner) -> Iterator[EngineCore]:
    """A core that ends its ranks also if the test fails: left to the garbage they would fail another test."""
    core = EngineCore(config, runner)
    try:
        yield core
    finally:
        core.shutdown()


def test_two_ranks_generate_what_one_does(llama: TinyModel) -> None:
    config = config_of(llama, tensor_parallel_size=2)
    compiler_backend = NeuronOnCPU()  # rank 0 compiles, so that its graphs show the collectives
    with fake_backend() as graphs, running(config, StaticPagedRunner(config, compiler_backend)) as core:
        assert len(other_ranks()) == 1
        assert generate_greedily(core, workload()[4:12]) == references(llama)[4:12]
    assert other_ranks() == []
    assert compiler_backend.num_graphs() == len(graphs) == 2
    for graph in graphs:
        assert list(graph.problems()) == []
        assert graph.operators()["_c10d_functional.all_reduce.default"] == 2 * 3


def test_a_rank_that_is_gone_fails_the_step_at_once(llama: TinyModel) -> None:
    config = config_of(llama, tensor_parallel_size=2)
    with running(config, runner := _runner(config)) as core:
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        core.add_request(EngineCoreRequest(request_id="a", prompt_token_ids=[5, 6, 7], sampling_params=params, seed=0))
        core.step()
        assert runner._worker_ranks is not None
        (process,) = runner._worker_ranks._processes
        process.kill()
        process.wait()
        with pytest.raises(RuntimeError, match=r"(?i)connection|closed|reset"):
            _finish(core)


def _finish(core: EngineCore) -> None:
    while core.has_work():
        core.step()


def _runner(config: EngineConfig) -> StaticPagedRunner:
    from headrace_engine.runner.loader import create_runner

    runner = create_runner(config)
    assert isinstance(runner, StaticPagedRunner)
    return runner


def test_a_model_that_cannot_be_divided_is_refused(tiny_model: Callable[[str], TinyModel]) -> None:
    runner = _runner(config_of(tiny_model("qwen3"), tensor_parallel_size=2))
    with pytest.raises(ConfigError, match="must divide the model's 1 key and value heads"):
        runner.load_model()


def test_a_device_without_collectives_is_refused(llama: TinyModel) -> None:
    class WithoutDevice(XLA):
        def probe(self) -> None:
            """There is none."""

    config = config_of(llama, tensor_parallel_size=2, device="xla")
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2, but device xla has no collectives"):
        StaticPagedRunner(config, WithoutDevice()).load_model()


def test_a_rank_that_cannot_start_is_named(llama: TinyModel) -> None:
    class OnlyHere(Neuron):
        """Rank 0 has a device, the other ranks look for theirs in vain."""

        def probe(self) -> None:
            """It is there."""

    config = config_of(llama, tensor_parallel_size=2, device="neuron")
    with pytest.raises(ConfigError, match="rank 1 of 2 could not start, exit status 1"):
        StaticPagedRunner(config, OnlyHere()).load_model()
