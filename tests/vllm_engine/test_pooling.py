"""Models that embed, score and classify on vLLM's pooling runner: rows as Headrace's own engine computes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.pooling.tiny_pooling_models import NORMALIZE, add_modules, build, dense, pooling
from headrace_engine.conformance.launcher import Launcher
from headrace_engine.conformance.suite import Outcome, Suite
from headrace_engine.core.process import EngineCoreProcess
from headrace_engine.errors import ConfigError, ModelLoadError
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.requests.pooling_request import PoolingCoreRequest
from vllm_engine.driven_engine import READY_SECONDS

SIZE = 128
CONFIG = {"hidden_size": SIZE, "num_attention_heads": 4, "head_dim": 32}
"""vLLM's attention on a CPU has no heads of 8 and 16 numbers."""
PLAIN = [[2, 10, 11, 3], [2, 50, 3], [2, *range(20, 70), 3]]
PAIRS = [[2, 10, 11, 3, 12, 3], [2, 50, 3, 20, 21, 22, 3]]


@pytest.fixture
def vllm(vllm_python: str) -> dict[str, Any]:
    return {"engine": "vllm", "engine_python": vllm_python, "engine_args": {"enforce_eager": True}}


def embedder(folder: Path, architecture: str = "bert", *modules: Any) -> Path:
    build(folder, architecture, config=CONFIG)
    mode = "lasttoken" if architecture == "qwen3" else "mean"
    add_modules(folder, modules or [pooling(mode, embedding_dimension=SIZE), NORMALIZE])
    return folder


def classifier(folder: Path, architecture: str, labels: int) -> Path:
    build(folder, architecture, suffix="ForSequenceClassification", config={**CONFIG, "num_labels": labels})
    return folder


@contextmanager
def started(folder: Path, **options: Any) -> Iterator[EngineCoreProcess]:
    args = {"dtype": "float32", "kv_cache_memory": 64 << 20, **options}
    process = EngineCoreProcess(EngineArgs(model=str(folder), **args).create_engine_config())
    try:
        process.wait_ready(READY_SECONDS)
        yield process
    finally:
        process.shutdown()
        process.close()


def rows_of(process: EngineCoreProcess, **request: Any) -> np.ndarray[Any, Any]:
    process.add_request(PoolingCoreRequest(request_id="r", **request))
    data = b""
    while True:
        step = process.get_outputs()
        assert step is not None
        for found in step.rows:
            assert found.error is None
            data += found.data
            if found.is_last:
                return np.frombuffer(data, "<f4").reshape(len(request["inputs"]), -1)


def compare(folder: Path, vllm: dict[str, Any], requests: list[dict[str, Any]]) -> None:
    with started(folder) as own, started(folder, **vllm) as theirs:
        for request in requests:
            expected = rows_of(own, **request)
            np.testing.assert_allclose(rows_of(theirs, **request), expected, rtol=1e-3, atol=1e-4)
            assert np.ptp(expected, axis=0).max() > 1e-2  # the inputs differ


@pytest.mark.parametrize("architecture", ["bert", "roberta", "modernbert", "qwen3"])
def test_embeddings_are_those_of_our_engine(architecture: str, tmp_path: Path, vllm: dict[str, Any]) -> None:
    whole = {"task": "embed", "inputs": PLAIN}
    compare(embedder(tmp_path, architecture), vllm, [whole, {**whole, "normalize": False}])


def test_the_first_token_is_pooled_where_the_folder_says_so(tmp_path: Path, vllm: dict[str, Any]) -> None:
    folder = embedder(tmp_path, "bert", pooling("cls", embedding_dimension=SIZE))
    compare(folder, vllm, [{"task": "embed", "inputs": PLAIN}])


@pytest.mark.parametrize("architecture", ["bert", "roberta"])
def test_pairs_are_scored_as_by_our_engine(architecture: str, tmp_path: Path, vllm: dict[str, Any]) -> None:
    types = [4, 3] if architecture == "bert" else []
    pairs = {"inputs": PAIRS, "second_from": types}
    requests: list[dict[str, Any]] = [{"task": "score", **pairs}, {"task": "score", **pairs, "activation": False}]
    compare(classifier(tmp_path, architecture, 1), vllm, requests)


def test_classes_are_those_of_our_engine(tmp_path: Path, vllm: dict[str, Any]) -> None:
    whole = {"task": "classify", "inputs": PLAIN}
    compare(classifier(tmp_path, "bert", 3), vllm, [whole, {**whole, "activation": False}])


@pytest.mark.parametrize("kind", ["embed", "score"])
def test_vllm_keeps_every_promise_about_rows(kind: str, tmp_path: Path, vllm: dict[str, Any]) -> None:
    folder = embedder(tmp_path) if kind == "embed" else classifier(tmp_path, "bert", 1)
    options = {
        "model": str(folder),
        "max_model_len": 60,
        "max_num_batched_tokens": 256,
        "kv_cache_memory": 64 << 20,
        **vllm,
    }
    found = [verdict for verdict in Suite(Launcher(options=options)).run() if verdict.case.group == "pooling"]
    assert [(verdict.case.name, verdict.reason) for verdict in found if verdict.outcome is Outcome.FAILED] == []
    assert sum(verdict.outcome is Outcome.PASSED for verdict in found) >= 9


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([pooling("mean", embedding_dimension=SIZE), dense(SIZE, 16)], "it has the module Dense after the pooling"),
        ([pooling("max", embedding_dimension=SIZE)], "its pooling is max"),
        ([pooling(["mean", "cls"], embedding_dimension=SIZE)], "its pooling is "),
        ([pooling("mean", embedding_dimension=SIZE, include_prompt=False)], "leaves out the tokens of the prompt"),
    ],
)
def test_a_folder_that_vllm_computes_otherwise_is_refused(
    modules: list[Any], message: str, tmp_path: Path, vllm: dict[str, Any]
) -> None:
    folder = embedder(tmp_path, "bert", *modules)
    with pytest.raises(ModelLoadError, match=message), started(folder, **vllm):
        pass


def test_options_of_models_that_generate_are_refused(tmp_path: Path, vllm: dict[str, Any]) -> None:
    with (
        pytest.raises(ConfigError, match="enable_lora is set, but"),
        started(embedder(tmp_path), enable_lora=True, **vllm),
    ):
        pass
