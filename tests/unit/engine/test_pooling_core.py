"""The step loop of pooling models on a runner without a model: rows in order, errors, aborts, resumed requests."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from headrace_engine.core.outputs import PooledRows
from headrace_engine.core.pooling_core import PoolingCore
from headrace_engine.options.config import EngineConfig, ModelConfig
from headrace_engine.requests.pooling_request import PoolingCoreRequest
from headrace_engine.runner.contracts import ModelInfo, PoolingBatch, PoolingInfo

BAD = 666


class SumRunner:
    """The row of an input is the sum of its token ids. That of an input with `BAD` is not finite."""

    def __init__(self, step_tokens: int = 100) -> None:
        self._step_tokens = step_tokens

    def load_model(self) -> ModelInfo:
        return ModelInfo(
            vocab_size=1000,
            max_model_len=500,
            eos_token_ids=[],
            architecture="Sum",
            dtype="float32",
            device="cpu",
            attention="none",
            num_parameters=0,
            pooling=PoolingInfo(
                tasks=("embed",), dimensions=1, max_input_tokens=500, max_step_tokens=self._step_tokens
            ),
        )

    def compute(self, batch: PoolingBatch) -> list[bytes | None]:
        tokens = [one.token_ids for one in batch.inputs()]
        return [None if BAD in ids else struct.pack("<f", sum(ids)) for ids in tokens]

    def shutdown(self) -> None:
        """Nothing to do."""


def make_core(step_tokens: int = 100) -> PoolingCore:
    return PoolingCore(EngineConfig(model=ModelConfig()), SumRunner(step_tokens))


def request(name: str, inputs: list[list[int]], **options: Any) -> PoolingCoreRequest:
    return PoolingCoreRequest(request_id=name, task="embed", inputs=inputs, **options)


def drain(core: PoolingCore) -> list[PooledRows]:
    rows = []
    while core.has_work():
        rows += core.step().rows
    core.check_integrity()
    return rows


def test_rows_come_in_the_order_of_the_inputs() -> None:
    core = make_core()
    core.add_request(request("a", [[number] * 40 for number in range(1, 8)]))
    rows = drain(core)
    assert [(found.first, found.count, found.is_last) for found in rows] == [
        (0, 2, False),
        (2, 2, False),
        (4, 2, False),
        (6, 1, True),
    ]
    numbers = struct.unpack("<7f", b"".join(found.data for found in rows))
    assert numbers == tuple(40 * number for number in range(1, 8))


def test_an_input_without_a_finite_row_ends_its_request_alone() -> None:
    core = make_core()
    core.add_request(request("good", [[1], [2]]))
    core.add_request(request("bad", [[3], [BAD], [4]], first=5))
    rows = {found.request_id: found for found in drain(core)}
    assert rows["bad"].error == "input[6] has no finite embedding"
    assert rows["bad"].count == 0
    assert rows["bad"].is_last
    assert (rows["good"].count, rows["good"].error) == (2, None)


def test_a_resumed_request_counts_from_its_first_missing_input() -> None:
    core = make_core()
    core.add_request(request("a", [[1], [2]], first=3))
    assert [(found.first, found.count, found.is_last) for found in drain(core)] == [(3, 2, True)]


def test_an_aborted_request_gets_no_more_rows() -> None:
    core = make_core()
    core.add_request(request("a", [[1] * 60] * 3))
    core.add_request(request("b", [[2]]))
    core.step()
    core.abort_requests(["a", "unknown"])
    assert [found.request_id for found in drain(core)] in ([], ["b"])


def test_a_wrong_request_gets_its_reason_and_others_go_on() -> None:
    core = make_core()
    core.add_request(request("long", [[1], [1] * 501]))
    core.add_request(request("none", []))
    core.add_request(request("good", [[7]]))
    core.add_request(PoolingCoreRequest(request_id="score", task="score", inputs=[[1]]))
    errors = {found.request_id: found.error for found in drain(core)}
    assert errors == {
        "long": "input[1] has 501 tokens, the model takes 1 to 500",
        "none": "the request has no inputs",
        "score": "the model computes embed, not score",
        "good": None,
    }


@pytest.mark.parametrize("tenant", ["", "other"])
def test_a_query_behind_a_job_of_2048_texts_waits_for_two_steps_at_most(tenant: str) -> None:
    core = make_core(1024)
    core.add_request(request("job", [[1] * (6 + 37 * number % 250) for number in range(2048)]))
    for number in range(50):
        core.step()  # it runs when the query comes
        core.add_request(request(f"query-{number}", [[2] * 12], tenant=tenant))
        assert f"query-{number}" in [found.request_id for found in core.step().rows]


def test_of_two_tenants_one_with_100_jobs_each_gets_half_of_the_tokens() -> None:
    core = make_core(1024)
    job = [[1] * (6 + 37 * number % 250) for number in range(2048)]
    for number in range(100):
        core.add_request(request(f"many-{number}", job, tenant="many"))
    core.add_request(request("one-0", job, tenant="one"))
    tokens, steps = {"many": 0, "one": 0}, 0
    while tokens["one"] < sum(map(len, job)):
        steps += 1
        for found in core.step().rows:
            computed = job[found.first : found.first + found.count]
            tokens[found.request_id.partition("-")[0]] += sum(map(len, computed))
    assert tokens["many"] == pytest.approx(tokens["one"], abs=1024)
    assert steps == pytest.approx(2 * sum(map(len, job)) / 1024, rel=0.1)


def test_a_better_priority_overtakes_between_steps() -> None:
    core = make_core()
    core.add_request(request("job", [[1] * 90] * 4, priority=3))
    core.step()
    core.add_request(request("query", [[1] * 20], priority=0))
    assert [found.request_id for found in core.step().rows] == ["query"]
    assert drain(core)[-1].request_id == "job"
