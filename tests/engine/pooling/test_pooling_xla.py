"""Models that embed or score, on PyTorch/XLA's CPU client. Runs by `make test-xla`, as `static/test_static_xla.py`."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

os.environ.setdefault("PJRT_DEVICE", "CPU")  # read when torch_xla is imported
pytest.importorskip("torch_xla")

from engine.pooling.test_parity_with_sentence_transformers import distance, embeddings, recorded, scores
from engine.pooling.test_pooling_devices import NAMES, encoder_of
from engine.pooling.tiny_pooling_models import SCORERS
from headrace_engine.api.llm import LLM
from headrace_engine.runner.static import devices
from headrace_engine.runner.static.xla import XLA


@pytest.mark.parametrize("name", [name for name in NAMES if name != "modernbert"])  # torch 2.9 draws other weights
def test_a_shape_is_compiled_once_and_the_numbers_are_those_of_sentence_transformers(
    pooling_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(devices._FLAVOURS, "xla", partial(XLA, "CPU"))
    llm = LLM(str(pooling_folder(name)), dtype="float32", device="xla", max_num_batched_tokens=128)
    encoder = encoder_of(llm)
    compiled = encoder._compiler_backend.num_graphs()
    assert compiled <= len(encoder.shapes())  # fewer if a test before compiled the same graph
    if name in SCORERS:
        same = slice(0, -1 if name == "logit-score" else None)
        assert float((scores(llm, activation=False) - recorded(f"{name}/logits"))[same].abs().max()) <= 1e-5
    else:
        assert distance(embeddings(llm), recorded(f"{name}/plain")) <= 1e-6
    assert encoder._compiler_backend.num_graphs() == compiled
    assert encoder._compiler_backend.fallback_operators() == []
