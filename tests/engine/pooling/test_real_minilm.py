"""The real MiniLM computes what sentence-transformers computes with it."""

from __future__ import annotations

import numpy as np
import pytest

from engine.pooling import real_minilm
from engine.pooling.parity_cases import read_recorded, unpacked
from headrace_engine import LLM, PoolingParams

FOLDER = real_minilm.folder()
pytestmark = pytest.mark.skipif(FOLDER is None, reason="all-MiniLM-L6-v2 is not installed (make minilm)")


def expected() -> np.ndarray:
    return np.array(unpacked(read_recorded()[real_minilm.CASE]))


def distance(found: np.ndarray, others: np.ndarray) -> float:
    """The largest 1 - cosine of two matrices whose rows have the length 1."""
    return float((1 - (found * others).sum(1)).max())


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-6), ("bfloat16", 5e-4)])
def test_real_embeddings_are_those_of_sentence_transformers(dtype: str, limit: float) -> None:
    llm = LLM(str(FOLDER), dtype=dtype)
    outputs = llm.embed(real_minilm.TEXTS, use_tqdm=False, pooling_params=PoolingParams(truncate="end"))
    found = np.array([output.outputs.embedding for output in outputs])
    assert distance(found, expected()) <= limit
    alike, other = found[0] @ found[1], found[0] @ found[2]
    assert alike > other + 0.3, "two texts about mills are closer than one about interest rates"
