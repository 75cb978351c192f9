"""A worker computes what the library computes, with a model of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engine.pooling import real_minilm
from engine.pooling.parity_cases import read_recorded, unpacked
from engine.pooling.tiny_pooling_models import NORMALIZE, add_modules, build, pooling
from headrace_broker import BrokerSettings, Client
from headrace_engine import LLM
from service.workers.service import DEADLINE, QUEUE, Service

TEXTS = ["the mill", "a wheel in the water", "the mill", "river"]


def test_a_worker_answers_with_the_rows_of_the_library(make_service: Callable[[], Service], tmp_path: Path) -> None:
    folder = tmp_path / "bert"
    build(folder, "bert")
    add_modules(folder, [pooling(), NORMALIZE])
    service = make_service()
    service.start_worker(model=str(folder), dtype="float32").wait_ready()
    outputs = LLM(str(folder), dtype="float32").embed(TEXTS, use_tqdm=False)
    expected = np.array([output.outputs.embedding for output in outputs], "<f4")
    result = service.app.send_task("headrace.embed", kwargs={"input": TEXTS}, queue=QUEUE).get(timeout=DEADLINE)
    rows = np.frombuffer(result["data"]["bytes"], "<f4").reshape(result["data"]["shape"])
    assert np.array_equal(rows, expected)
    with Client(BrokerSettings(redis_url=service.url), model="tiny") as client:
        assert client.embed(TEXTS, timeout=DEADLINE).rows.tolist() == expected.tolist()


@pytest.mark.skipif(real_minilm.folder() is None, reason="all-MiniLM-L6-v2 is not installed (make minilm)")
def test_the_real_minilm_answers_with_the_rows_of_sentence_transformers(make_service: Callable[[], Service]) -> None:
    service = make_service()
    service.start_worker(model=real_minilm.folder(), dtype="float32").wait_ready()
    with Client(BrokerSettings(redis_url=service.url), model="tiny") as client:
        found = client.embed(real_minilm.TEXTS, truncate="end", timeout=DEADLINE)
    expected = np.array(unpacked(read_recorded()[real_minilm.CASE]))
    assert found.truncated == [7]
    assert (1 - (np.asarray(found.rows) * expected).sum(1)).max() <= 1e-6
