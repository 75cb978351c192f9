"""Embeddings and scores are those of sentence-transformers, for each architecture and module that is served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.pooling.parity_cases import PAIRS, TEXTS, VARIANTS, read_recorded, unpacked, variants
from engine.pooling.tiny_pooling_models import EMBEDDERS, SCORERS
from headrace_engine.api.llm import LLM
from headrace_engine.requests.pooling_params import PoolingParams
from headrace_engine.runner.pooling import vectors
from headrace_engine.runner.pooling.encoders import PackedEncoder
from headrace_engine.runner.pooling.pooling_runner import TransformersPoolingRunner

RECORDED = read_recorded()
Load = Callable[[str], LLM]


def embeddings(llm: LLM, **options: Any) -> torch.Tensor:
    outputs = llm.embed(TEXTS, use_tqdm=False, pooling_params=PoolingParams(truncate="end", **options))
    return torch.tensor([output.outputs.embedding for output in outputs], dtype=torch.float64)


def scores(llm: LLM, *, activation: bool = True) -> torch.Tensor:
    params = PoolingParams(truncate="end", use_activation=activation)
    if "score" not in llm.pooling_engine.info.tasks:
        rows = [output.outputs.probs for output in llm.classify(PAIRS, use_tqdm=False, pooling_params=params)]
        return torch.tensor(rows, dtype=torch.float64)
    queries, documents = [query for query, _ in PAIRS], [document for _, document in PAIRS]
    found = llm.score(queries, documents, use_tqdm=False, pooling_params=params)
    return torch.tensor([[output.outputs.score] for output in found], dtype=torch.float64)


def recorded(case: str) -> torch.Tensor:
    return torch.tensor(unpacked(RECORDED[case]), dtype=torch.float64)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest 1 - cosine."""
    return float((1 - torch.nn.functional.cosine_similarity(found, expected)).max())


@pytest.mark.parametrize("case", [f"{name}/{variant}" for name in EMBEDDERS for variant in variants(name)])
def test_embeddings_are_those_of_sentence_transformers(pooling_llm: Load, case: str) -> None:
    name, variant = case.split("/")
    found, expected = embeddings(pooling_llm(name), **VARIANTS[variant]), recorded(case)
    assert distance(found, expected) <= 1e-6
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", SCORERS)
def test_scores_are_those_of_sentence_transformers(pooling_llm: Load, name: str) -> None:
    llm = pooling_llm(name)
    # the last pair is too long: here the document is cut before a template is rendered, there the rendered text
    same = slice(0, -1 if name == "logit-score" else None)

    def check(found: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(found[same], expected[same], rtol=1e-5, atol=1e-5)

    check(scores(llm, activation=False), recorded(f"{name}/logits"))
    if "score" in llm.pooling_engine.info.tasks:
        check(scores(llm), recorded(f"{name}/scores"))
    else:  # sentence-transformers leaves the softmax over several classes to its caller
        check(scores(llm), recorded(f"{name}/logits").softmax(-1))


@pytest.mark.parametrize("fault", ["positions", "pooling", "window", "types"])
def test_the_suite_fails_if_something_is_wrong(
    pooling_folder: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The probe at load would notice the faults, so they appear after it."""
    name = {"positions": "roberta", "pooling": "two-modes", "window": "modernbert", "types": "bert-1"}[fault]
    llm = LLM(str(pooling_folder(name)), dtype="float32")
    runner = llm.pooling_engine._core.runner
    assert isinstance(runner, TransformersPoolingRunner)
    encoder = runner._encoder
    assert isinstance(encoder, PackedEncoder)
    if fault == "positions":
        encoder._positions.first -= 2
    elif fault == "pooling":
        pooled = vectors._pooled
        monkeypatch.setattr(
            vectors,
            "_pooled",
            lambda tokens, mode, first: pooled(tokens, "lasttoken" if mode == "cls" else mode, first),
        )
    elif fault == "window":
        forward = encoder.attention.forward

        def wider(*tensors: Any, window: int | None, **options: Any) -> torch.Tensor:
            return forward(*tensors, window=None if window is None else window + 1, **options)

        monkeypatch.setattr(encoder.attention, "forward", wider)
    else:
        head = runner._head
        monkeypatch.setattr(runner, "_head", lambda hidden, inputs: head(hidden, inputs))
        whole = encoder.__class__.__call__
        monkeypatch.setattr(
            runner, "_encoder", lambda inputs: whole(encoder, [replace(one, second_from=0) for one in inputs])
        )
    if name in SCORERS:
        assert float((scores(llm, activation=False) - recorded(f"{name}/logits")).abs().max()) > 1e-5
    else:
        assert distance(embeddings(llm), recorded(f"{name}/plain")) > 1e-6


@pytest.mark.parametrize(
    "name", ["bert", "roberta", "qwen3", "gemma3_text", "nomic_bert", "two-dense", "bert-3", "logit-score"]
)
def test_an_input_has_the_same_bytes_alone_among_others_and_in_another_order(pooling_llm: Load, name: str) -> None:
    llm = pooling_llm(name)
    assert llm.pooling_engine.info.batch_invariant

    def rows(items: list[Any]) -> list[list[float]]:
        params = PoolingParams(truncate="end")
        if name in EMBEDDERS:
            found = llm.embed(items, use_tqdm=False, pooling_params=params)
            return [output.outputs.embedding for output in found]
        if name == "bert-3":
            return [output.outputs.probs for output in llm.classify(items, use_tqdm=False, pooling_params=params)]
        queries, documents = zip(*items, strict=True)
        return [[one.outputs.score] for one in llm.score(queries, documents, use_tqdm=False, pooling_params=params)]

    items: list[Any] = [*TEXTS] if name in EMBEDDERS else [*PAIRS]
    together = rows(items * 9)
    assert rows(items[::-1]) == together[: len(items)][::-1]
    assert [rows([item])[0] for item in items] == together[: len(items)]
    assert together == together[: len(items)] * 9
