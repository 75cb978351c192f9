"""Our own engine passes the cases of pooling that every engine must pass, with an encoder and with a classifier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.pooling.tiny_pooling_models import NORMALIZE, SIZE, add_modules, build, pooling
from headrace_engine.conformance.case import Broken
from headrace_engine.conformance.launcher import Launcher
from headrace_engine.conformance.rows import Rows, expect_equal_rows
from headrace_engine.conformance.suite import Outcome, Suite
from headrace_engine.core.outputs import PooledRows
from headrace_engine.requests.pooling_request import PoolingCoreRequest

pytestmark = pytest.mark.rotated(
    "engine/headrace_engine/runner/pooling", "engine/headrace_engine/core", "engine/headrace_engine/conformance"
)


def run(folder: Path) -> dict[str, tuple[Outcome, str]]:
    options: dict[str, Any] = {"model": str(folder), "max_model_len": 60, "max_num_batched_tokens": 256}
    return {
        v.case.name: (v.outcome, v.reason) for v in Suite(Launcher(options=options)).run() if v.case.group == "pooling"
    }


def test_a_model_that_embeds_keeps_every_promise(tmp_path: Path) -> None:
    build(tmp_path, "bert", config={"matryoshka_dimensions": [SIZE, SIZE // 2]})
    add_modules(tmp_path, [pooling(), NORMALIZE])
    found = run(tmp_path)
    others = {name: verdict for name, verdict in found.items() if verdict[0] is not Outcome.PASSED}
    assert others == {"a_pair_is_not_its_reverse": (Outcome.DOES_NOT_APPLY, "the model does not score pairs")}
    assert len(found) > 10


def test_a_model_that_scores_keeps_every_promise(tmp_path: Path) -> None:
    build(tmp_path, "bert", suffix="ForSequenceClassification", config={"num_labels": 1})
    found = run(tmp_path)
    others = {name: verdict for name, verdict in found.items() if verdict[0] is not Outcome.PASSED}
    assert list(others.values()) == [(Outcome.DOES_NOT_APPLY, "the model does not embed")]


REQUEST = PoolingCoreRequest(request_id="r", task="embed", inputs=[[1], [2], [3]], first=4)
ROW = b"\x00\x00\x80?"


@pytest.mark.parametrize(
    "outputs",
    [
        [PooledRows("r", 5, 1, ROW, False)],
        [PooledRows("r", 4, 1, ROW, False), PooledRows("r", 4, 1, ROW, False)],
        [PooledRows("r", 4, 2, ROW * 2, True)],
        [PooledRows("r", 4, 3, ROW * 3, True), PooledRows("r", 7, 1, ROW, False)],
        [PooledRows("r", 4, 1, b"\x00\x00\xc0\x7f", False)],
        [PooledRows("r", 4, 0, b"", False, "no")],
    ],
    ids=["gap", "twice", "missing", "after the end", "not finite", "error that continues"],
)
def test_rows_that_are_wrong_are_found(outputs: list[PooledRows]) -> None:
    rows = Rows(REQUEST)
    for output in outputs[:-1]:
        rows.take(output, 1)
    with pytest.raises(Broken):
        rows.take(outputs[-1], 1)


def test_rows_are_compared_by_bytes_if_the_engine_claims_it() -> None:
    near = b"\x01\x00\x80?"
    expect_equal_rows([near], [ROW], "near", exactly=False)
    with pytest.raises(Broken, match="other bytes"):
        expect_equal_rows([near], [ROW], "near", exactly=True)
    with pytest.raises(Broken, match="differs by"):
        expect_equal_rows([b"\x00\x00\x00@"], [ROW], "far", exactly=False)
