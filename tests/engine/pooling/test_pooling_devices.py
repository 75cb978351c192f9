"""Models that embed or score on devices other than the CPU: compiled for static shapes, as for Neuron, or on a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.pooling.test_parity_with_sentence_transformers import distance, embeddings, recorded, scores
from engine.pooling.test_varlen import flash_attention
from engine.pooling.tiny_pooling_models import MAX_TOKENS, SCORERS, VOCAB_SIZE
from engine.static.fake_neuron import NeuronOnCPU, fake_backend
from engine.static.traced_graphs import Graph
from headrace_engine.api.llm import LLM
from headrace_engine.errors import ConfigError, RecompilationError
from headrace_engine.runner.contracts import PoolingInput
from headrace_engine.runner.pooling.padded_encoder import PaddedEncoder
from headrace_engine.runner.static import devices

pytestmark = pytest.mark.rotated("engine/headrace_engine/runner/pooling", "engine/headrace_engine/runner/static")

Folder = Callable[[str], Path]
# positions from 2 on, windows, no positions, causal attention, windows both ways, modules behind it, heads and pairs
NAMES = ["bert", "roberta", "modernbert", "nomic_bert", "qwen3", "gemma3_text", "two-dense", "bert-3", "logit-score"]


@pytest.fixture(scope="module")
def compiled() -> Iterator[list[Graph]]:
    """All that the compiler of Neuron devices would be given in this file."""
    with fake_backend() as graphs, pytest.MonkeyPatch.context() as patch:
        patch.setitem(devices._FLAVOURS, "neuron", NeuronOnCPU)
        yield graphs


def encoder_of(llm: LLM) -> PaddedEncoder:
    encoder = llm.pooling_engine._core.runner._encoder  # type: ignore[attr-defined]
    assert isinstance(encoder, PaddedEncoder)
    return encoder


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("compiled")
def test_padded_texts_get_the_numbers_of_sentence_transformers(pooling_folder: Folder, name: str) -> None:
    llm = LLM(str(pooling_folder(name)), dtype="float32", device="neuron", max_num_batched_tokens=128)
    if name in SCORERS:
        # the last pair is too long: the template of logit-score is cut at another place
        same = slice(0, -1 if name == "logit-score" else None)
        assert float((scores(llm, activation=False) - recorded(f"{name}/logits"))[same].abs().max()) <= 1e-5
    else:
        assert distance(embeddings(llm), recorded(f"{name}/plain")) <= 1e-6


@torch.inference_mode()
def test_every_shape_is_one_static_graph_and_texts_compile_nothing(
    pooling_folder: Folder, compiled: list[Graph]
) -> None:
    before = len(compiled)
    llm = LLM(str(pooling_folder("bert")), dtype="float32", device="neuron", max_num_batched_tokens=128)
    encoder = encoder_of(llm)
    assert encoder.shapes() == [(1, 32), (4, 32), (1, MAX_TOKENS), (2, MAX_TOKENS)]
    graphs = compiled[before:]
    assert len(graphs) == 4
    assert [problem for graph in graphs for problem in graph.problems()] == []
    draw = random.Random(4)
    for _ in range(20):
        lengths = [draw.randint(1, MAX_TOKENS) for _ in range(draw.randint(1, 9))]
        texts = [PoolingInput(token_ids=[draw.randrange(VOCAB_SIZE) for _ in range(length)]) for length in lengths]
        assert encoder(texts).shape == (sum(lengths), 32)
    assert len(compiled) == before + 4
    with pytest.raises(RecompilationError, match="neuron met a shape that was not compiled"):
        encoder._run([PoolingInput(token_ids=[5])], (3, 32), sealed=True)


@torch.inference_mode()
@pytest.mark.usefixtures("compiled")
def test_padding_and_other_texts_have_no_effect(pooling_folder: Folder) -> None:
    encoder = encoder_of(LLM(str(pooling_folder("gemma3_text")), dtype="float32", device="neuron"))
    texts = [PoolingInput(token_ids=list(range(5, 5 + length))) for length in (1, 30, 7)]
    together = torch.split(encoder(texts), [1, 30, 7])
    for text, own in zip(texts, together, strict=True):
        torch.testing.assert_close(encoder([text]), own, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*NAMES, "mpnet"])
def test_a_gpu_would_compute_the_numbers_of_sentence_transformers(
    pooling_folder: Folder, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str
) -> None:
    """On the CPU, with a stand-in for the kernel that only a GPU has."""
    monkeypatch.setattr("headrace_engine.runner.cuda.device.find_device", lambda: torch.device("cpu"))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", flash_attention)
    llm = LLM(str(pooling_folder(name)), dtype=dtype, device="cuda")
    exact = dtype == "float32"
    if name in SCORERS:
        same = slice(0, -1 if name == "logit-score" else None)
        off = (scores(llm, activation=False) - recorded(f"{name}/logits"))[same].abs().max()
        assert float(off) <= (1e-5 if exact else 0.1)
    else:
        assert distance(embeddings(llm), recorded(f"{name}/plain")) <= (1e-6 if exact else 5e-3)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("mpnet", {"device": "static-cpu"}, "static-cpu cannot serve MPNetModel, whose attention cannot be replaced"),
        ("bert", {"device": "static-cpu", "tensor_parallel_size": 2}, "run on one device"),
        ("bert", {"device": "cuda"}, "device cuda was asked for, but torch"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_what_a_device_cannot_do_is_refused(
    pooling_folder: Folder, name: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        LLM(str(pooling_folder(name)), dtype="float32", **options)
