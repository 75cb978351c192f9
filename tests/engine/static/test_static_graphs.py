"""One graph a shape, all of them static, none with an operator that Neuron refuses, and none compiled while serving."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model_families import VOCAB_SIZE, WINDOW
from engine.static.fake_neuron import NeuronOnCPU, fake_backend
from engine.static.traced_graphs import BANNED, Graph, keep_graphs
from engine.test_parity import references, workload
from engine.tiny_models import TinyModel
from headrace_engine.core.engine_core import EngineCore
from headrace_engine.errors import RecompilationError
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.requests.request import EngineCoreRequest
from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.runner.static.group import Kind
from headrace_engine.runner.static.runner import StaticPagedRunner
from headrace_engine.runner.static.shapes import Shape, empty_inputs

pytestmark = pytest.mark.rotated_file("engine/headrace_engine/runner/static", "docs/neuron.md")


class Traced:
    """A core on the static runner, compiled by a backend that keeps what it is given."""

    def __init__(self, model: TinyModel, compiled: list[Graph], **options: Any) -> None:
        args: dict[str, Any] = {"dtype": "float32", "block_size": 16, "max_model_len": 112, **options}
        config = EngineArgs(model=model.folder, device="neuron", **args).create_engine_config()
        self.compiler_backend = NeuronOnCPU()
        self.runner = StaticPagedRunner(config, self.compiler_backend)
        before = len(compiled)
        self.core = EngineCore(config, self.runner)
        self.graphs = compiled[before:]
        self.tokens: dict[str, list[int]] = {}
        self.padding: list[tuple[int, int]] = []
        """Of each step: tokens, and those that only fill the shape."""

    def add(self, name: str, prompt: list[int], seed: int = 0, **params: Any) -> None:
        sampling = SamplingParams(ignore_eos=True, **params)
        self.core.add_request(
            EngineCoreRequest(request_id=name, prompt_token_ids=prompt, sampling_params=sampling, seed=seed)
        )
        self.tokens[name] = []

    def step(self) -> None:
        result = self.core.step()
        self.padding.append((result.stats.num_tokens, result.stats.num_padded_tokens))
        assert result.stats.compiled_graphs == self.compiler_backend.num_graphs()
        assert result.stats.warm_up_seconds == self.runner.warm_up_seconds > 0
        for news in result.outputs:
            self.tokens[news.request_id] += news.new_token_ids

    def finish(self) -> None:
        while self.core.has_work():
            self.step()


@pytest.fixture(scope="module")
def compiled() -> Iterator[list[Graph]]:
    """All that TorchNeuron would have been given in this file."""
    with fake_backend() as graphs:
        yield graphs


@pytest.fixture(scope="module")
def llama_traced(llama: TinyModel, compiled: list[Graph]) -> Traced:
    buckets = {"prefill_buckets": [16, 64], "decode_buckets": [1, 8], "context_buckets": [48, 112]}
    return Traced(llama, compiled, num_blocks=30, max_num_seqs=8, **buckets)


@pytest.fixture(scope="module")
def mistral_traced(tiny_model: Callable[[str], TinyModel], compiled: list[Graph]) -> Traced:
    """With a sliding window that the prompts exceed."""
    buckets = {"prefill_buckets": [32], "decode_buckets": [2, 8], "context_buckets": [112]}
    return Traced(tiny_model("mistral"), compiled, num_blocks=30, max_num_seqs=8, **buckets)


@pytest.mark.parametrize(("name", "num_shapes"), [("llama", 8), ("mistral", 3)])
def test_every_bucket_is_one_static_graph_and_compiled_tokens_are_those_of_transformers(
    request: pytest.FixtureRequest, tiny_model: Callable[[str], TinyModel], name: str, num_shapes: int
) -> None:
    traced: Traced = request.getfixturevalue(f"{name}_traced")
    assert len(traced.runner._grid.shapes()) == num_shapes
    assert traced.compiler_backend.num_graphs() == len(traced.graphs) == num_shapes
    assert [problem for graph in traced.graphs for problem in graph.problems()] == []
    for index, (prompt, max_tokens) in enumerate(workload()):
        traced.add(str(index), prompt, temperature=0, max_tokens=max_tokens)
    traced.finish()
    assert [traced.tokens[str(index)] for index in range(len(workload()))] == references(tiny_model(name))
    assert traced.compiler_backend.num_graphs() == num_shapes
    shapes = {1, 8, 16, 64} if name == "llama" else {2, 8, 32}
    assert {tokens + padded for tokens, padded in traced.padding if tokens} <= shapes
    assert max(len(prompt) for prompt, _ in workload()) > 3 * WINDOW


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_two_hundred_random_requests_compile_nothing(
    request: pytest.FixtureRequest, compiled: list[Graph], name: str
) -> None:
    traced: Traced = request.getfixturevalue(f"{name}_traced")
    before, compiled_before = traced.compiler_backend.num_graphs(), len(compiled)
    draw = random.Random(8)
    stem = [draw.randrange(3, VOCAB_SIZE) for _ in range(50)]
    for number in range(200):
        prompt = [
            *stem[: draw.choice([0, 0, 20, 50])],
            *(draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randint(1, 45))),
        ]
        params: dict[str, Any] = {"temperature": draw.choice([0.0, 0.7, 1.3]), "max_tokens": draw.randint(1, 6)}
        params |= draw.choice([{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1}, {"logprobs": 2}, {"min_tokens": 1}])
        traced.add(f"random {number}", prompt, seed=number, **params)
        if number % 3 == 0:
            traced.step()
        if number % 40 == 7:
            traced.core.abort_requests([f"random {number}"])
    traced.finish()
    traced.core.check_integrity()
    assert traced.compiler_backend.num_graphs() == before == len(traced.graphs)
    assert len(compiled) == compiled_before


def test_a_shape_that_was_not_warmed_up_is_an_error_and_not_a_compilation(llama_traced: Traced) -> None:
    before = llama_traced.compiler_backend.num_graphs()
    with torch.no_grad(), pytest.raises(RecompilationError, match="neuron met a shape that was not compiled"):
        llama_traced.runner._run(empty_inputs(Shape(3, 1, 7)), Kind.STEP)
    assert llama_traced.compiler_backend.num_graphs() == before


def test_graphs_hold_the_operators_that_are_listed_and_none_that_neuron_refuses(
    llama_traced: Traced, mistral_traced: Traced, tiny_model: Callable[[str], TinyModel], compiled: list[Graph]
) -> None:
    # what other models and precisions add is in each of their graphs: one is enough
    buckets = {"prefill_buckets": [1], "decode_buckets": [4], "context_buckets": [112], "max_num_seqs": 4}
    others = [
        Traced(tiny_model(name), compiled, num_blocks=30, dtype=dtype, **buckets)
        for name, dtype in (("qwen2", "float32"), ("qwen3", "bfloat16"))
    ]
    operators: Counter[str] = Counter()
    for traced in (llama_traced, mistral_traced, *others):
        assert [problem for graph in traced.graphs for problem in graph.problems()] == []
        found = sum((graph.operators() for graph in traced.graphs), Counter[str]())
        num_layers = len(traced.runner._shard.decoder.model.layers)
        # K/V memory is written in place, once a layer for keys and once for values
        assert found["aten.index_put.default"] == found["aten.copy_.default"] == 2 * num_layers * len(traced.graphs)
        assert found["aten.topk.default"] == len(traced.graphs)
        operators += found
    names = {name.split(".")[1] for name in operators if name.startswith("aten.")}
    text = (Path(__file__).parents[3] / "docs" / "neuron.md").read_text()
    listed = set(re.findall(r"`(\w+)`", text[text.index("## Operators") : text.index("They contain no `sort`")]))
    assert names == listed - {"all_reduce"}
    assert not names & set(BANNED) - {"topk"}


def test_the_check_of_operators_finds_what_it_looks_for() -> None:
    graphs: list[Graph] = []

    def step(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x.sort().values[index] + torch.rand_like(x)[0] + x.double().index_select(0, index)

    torch.compile(step, backend=keep_graphs(graphs), fullgraph=True)(torch.rand(4), torch.tensor([1, 2]))
    (graph,) = graphs
    problems = "\n".join(graph.problems())
    for sentence in (
        "aten.sort.default: sort is not supported",
        "randomness comes from the host",
        "it is in float64",
        "aten.index.Tensor: its index is torch.int64",
        "aten.index_select.default: its index is torch.int64",
    ):
        assert sentence in problems
