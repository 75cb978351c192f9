"""Tiny pooling models, loaded once for all tests of a process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.pooling.tiny_pooling_models import EMBEDDERS, SCORERS
from headrace_engine.api.llm import LLM


@pytest.fixture(scope="session")
def pooling_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes the folder of a tiny model. It must not be changed."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            (EMBEDDERS.get(name) or SCORERS[name])(made[name])
        return made[name]

    return make


@pytest.fixture(scope="session")
def pooling_llm(pooling_folder: Callable[[str], Path]) -> Callable[[str], LLM]:
    """Loads a tiny model in float32."""
    loaded: dict[str, LLM] = {}

    def load(name: str) -> LLM:
        if name not in loaded:
            loaded[name] = LLM(str(pooling_folder(name)), dtype="float32")
        return loaded[name]

    return load
