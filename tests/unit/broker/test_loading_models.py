"""Reports of loading workers: which are believed, and when another worker serves the model meanwhile."""

import math
from typing import Any

import pytest

from headrace_broker import LoadingModel, RegisteredModel
from headrace_broker.keys import LOADING_SECONDS
from headrace_broker.models.loading_models import read_loading
from headrace_broker.packing import pack

NOW = 1000.0
ROW: dict[str, Any] = {"names": ["m"], "progress": 0.5, "since": 990.0, "seen": 999.0}


def read(**rows: dict[str, Any]) -> dict[str, LoadingModel]:
    return read_loading({worker.encode(): pack(row) for worker, row in rows.items()}, NOW)


def test_several_workers_of_a_model_are_one_entry_with_the_most_progress() -> None:
    found = read(a=ROW, b={**ROW, "names": ["m", "alias"], "progress": 0.25, "since": 995.0})
    assert found == {
        "m": LoadingModel("m", 0.5, 995.0, frozenset({"a", "b"})),
        "alias": LoadingModel("alias", 0.25, 995.0, frozenset({"b"})),
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"seen": NOW - LOADING_SECONDS},
        {"seen": NOW + LOADING_SECONDS},
        {"seen": math.nan},
        {"since": math.inf},
        {"progress": 1.1},
        {"progress": math.nan},
        {"progress": "much"},
        {"names": "m"},
        {"names": [1, ["m"], {}, "x" * 300]},
        {"since": 1e300},
    ],
)
def test_a_report_that_is_old_or_malformed_is_left_out(wrong: dict[str, Any]) -> None:
    assert set(read(a={**ROW, **wrong}, b={**ROW, "names": ["other"]})) == {"other"}
    assert read_loading({b"a": b"\xc1", b"b": pack({})}, NOW) == {}


@pytest.mark.parametrize(
    ("seen", "worker", "is_served"),
    [
        (991.0, "a", True),  # by another worker, since nobody registers a model that it is loading
        (989.0, "a", False),  # by this worker, before it began to load again
        (989.0, "b", True),
        (900.0, "b", False),  # longer ago than workers register
        (1100.0, "b", False),  # by a clock that is wrong
    ],
)
def test_a_model_counts_as_served_if_another_worker_has_registered_it_lately(
    seen: float, worker: str, is_served: bool
) -> None:
    [loading] = read(a=ROW).values()
    assert loading.is_served(RegisteredModel("m", 64, seen, worker), NOW) is is_served
    assert loading.is_served(None, NOW) is False


def test_a_worker_that_registered_after_the_load_began_and_is_gone_serves_nothing() -> None:
    [loading] = read(a={**ROW, "since": 100.0}).values()
    assert loading.is_served(RegisteredModel("m", 64, 950.0, "b"), NOW) is True
    assert loading.is_served(RegisteredModel("m", 64, 900.0, "b"), NOW) is False
