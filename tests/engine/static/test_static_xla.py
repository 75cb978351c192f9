"""The step on PyTorch/XLA's CPU client: one compilation a shape, none while serving, nothing outside the device.

Runs by `make test-xla`, in an environment of its own: PyTorch/XLA ends with torch 2.9.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest

os.environ.setdefault("PJRT_DEVICE", "CPU")  # read when torch_xla is imported
pytest.importorskip("torch_xla")

from engine.model_families import VOCAB_SIZE
from engine.test_parity import references, workload
from engine.tiny_models import TinyModel
from headrace_engine.core.engine_core import EngineCore
from headrace_engine.errors import ConfigError, RecompilationError
from headrace_engine.options.config import EngineConfig
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.requests.request import EngineCoreRequest
from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.runner.static.compiler_backend import CompilerBackend, EagerCPU
from headrace_engine.runner.static.group import Kind
from headrace_engine.runner.static.runner import StaticPagedRunner
from headrace_engine.runner.static.shapes import Shape, empty_inputs
from headrace_engine.runner.static.xla import XLA


def config_of(model: TinyModel) -> EngineConfig:
    buckets = {"prefill_buckets": [16, 64], "decode_buckets": [1, 8], "context_buckets": [112]}
    args: dict[str, Any] = {"dtype": "float32", "block_size": 16, "num_blocks": 30, "max_num_seqs": 8, **buckets}
    return EngineArgs(model=model.folder, device="xla", max_model_len=112, **args).create_engine_config()


class Served:
    def __init__(self, model: TinyModel, compiler_backend: CompilerBackend) -> None:
        config = config_of(model)
        self.runner = StaticPagedRunner(config, compiler_backend)
        self.core = EngineCore(config, self.runner)

    def generate(self, requests: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
        tokens: dict[str, list[int]] = {}
        for number, (prompt, params) in enumerate(requests):
            self.core.add_request(
                EngineCoreRequest(request_id=str(number), prompt_token_ids=prompt, sampling_params=params, seed=number)
            )
            tokens[str(number)] = []
            if number % 2 and self.core.has_work():
                self._step(tokens)
        while self.core.has_work():
            self._step(tokens)
        return list(tokens.values())

    def _step(self, tokens: dict[str, list[int]]) -> None:
        for news in self.core.step().outputs:
            tokens[news.request_id] += news.new_token_ids


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_tokens_are_those_of_transformers_and_nothing_is_compiled_while_serving(
    tiny_model: Callable[[str], TinyModel], name: str
) -> None:
    model, compiler_backend = tiny_model(name), XLA("CPU")
    served = Served(model, compiler_backend)
    assert compiler_backend.num_graphs() == len(served.runner._grid.shapes()) == 4
    greedy = [
        (prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
        for prompt, max_tokens in workload()
    ]
    assert served.generate(greedy) == references(model)
    draw = random.Random(4)
    ways: list[dict[str, Any]] = [{}, {"top_k": 9}, {"top_p": 0.8}]
    sampled = [
        (
            [draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randint(1, 80))],
            SamplingParams(temperature=0.8, max_tokens=6, ignore_eos=True, **draw.choice(ways)),
        )
        for _ in range(60)
    ]
    assert served.generate(sampled) == Served(model, EagerCPU()).generate(sampled)
    assert compiler_backend.num_graphs() == 4
    assert compiler_backend.fallback_operators() == []
    with pytest.raises(RecompilationError, match="a shape that was not compiled at the start"):
        served.runner._run(empty_inputs(Shape(3, 1, 7)), Kind.STEP)


def test_the_cpu_client_is_not_taken_for_a_neuron_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "NEURON")
    with pytest.raises(ConfigError, match="device xla finds no NEURON device"):
        XLA().probe()
