"""A worker follows its engine's capabilities: refusals, draws, metrics, free slots, and engines that end the worker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace_cli.commands.top import draw
from headrace_cli.service_sampler import Sample, report
from headrace_engine.core.outputs import EngineCoreOutputs, StepStats
from headrace_engine.options.capabilities import EngineCapabilities
from headrace_engine.requests.request import FinishReason
from headrace_monitoring.step_families import SOURCES
from unit.monitoring.scrape import Scrape
from unit.workers.desk import Desk
from unit.workers.fakes import CAPABILITIES, MODEL, FakeCeleryRequest

SAMPLED = {"prompt": "abc", "sampling_params": {"max_tokens": 4, "temperature": 1.0}}
GREEDY = {"prompt": "abc", "sampling_params": {"max_tokens": 4, "temperature": 0}}
RESUMED = "headrace_resumed_across_draws_total"


def without(**lacking: Any) -> EngineCapabilities:
    return replace(CAPABILITIES, **lacking)


def begun(draws: str | None, tokens: int = 1, **last: Any) -> list[tuple[int, int, str, dict[str, Any]]]:
    """Make a stream that another worker has begun. With None it did not record its draws."""
    named = {} if draws is None else {"draws": draws}
    chunks = [{"index": 0, "token_ids": [13], "text": "d", "logprobs": None} for _ in range(tokens)]
    if chunks:
        chunks[-1] |= last
    entries = [(1, offset, "chunk", chunk) for offset, chunk in enumerate(chunks, start=1)]
    return [(1, 0, "start", {"worker": "another", **named}), *entries]


def resume(
    earlier: list[tuple[int, int, str, dict[str, Any]]], kwargs: Any = SAMPLED, engine: Any = CAPABILITIES
) -> Desk:
    desk = Desk(capabilities=engine)
    desk.redis.streams["headrace:stream:r1"] = earlier
    desk.accept(FakeCeleryRequest(kwargs=kwargs))
    return desk


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_a_request_beyond_an_engine_limit_is_refused_before_the_engine() -> None:
    desk = Desk(engine="vllm", capabilities=without(max_allowed_token_ids=3, prompt_logprobs=False))
    params = {"max_tokens": 4, "allowed_token_ids": [10, 11, 12, 13], "prompt_logprobs": 1}
    desk.accept(FakeCeleryRequest(kwargs={"prompt": "abc", "sampling_params": params}))
    desk.assert_idle()
    assert desk.results["r1"]["error"] == {
        "code": "invalid_request",
        "message": "allowed_token_ids has 4 entries, the engine vllm takes at most 3; "
        "prompt_logprobs is 1, which the engine vllm does not support",
    }
    assert desk.engine.sent == []
    desk.accept(FakeCeleryRequest("r2", {"prompt": "abc", "sampling_params": {"allowed_token_ids": [10, 11, 12]}}))
    assert len(desk.engine.sent) == 1


@pytest.mark.parametrize("params", [{"temperature": 3}, {"stop_token_ids": [5, 6], "min_tokens": 1}, {"seed": 7}])
def test_a_plain_request_gets_the_same_checks(params: dict[str, Any]) -> None:
    limits = without(temperature_range=(0.01, 2.0), max_stop_token_ids=2, draws=None)
    desk = Desk(capabilities=limits, prepares_plain_requests=True)
    desk.accept(FakeCeleryRequest("r1", {"prompt": "abc", "sampling_params": params}))
    desk.settle()
    assert desk.results["r1"]["error"]["code"] == "invalid_request"
    assert desk.engine.sent == []


def test_a_message_without_a_seed_is_served_by_an_engine_without_repeatable_seeds() -> None:
    desk = Desk(engine="vllm", capabilities=without(draws=None))
    desk.accept(FakeCeleryRequest("r1", SAMPLED))
    desk.accept(FakeCeleryRequest("r2", {**SAMPLED, "sampling_params": {"seed": 7}}))
    assert [request.request_id[:2] for request in desk.engine.sent] == ["r1"]
    desk.settle()
    assert "seed is 7, but the engine vllm cannot repeat" in desk.results["r2"]["error"]["message"]


def test_an_engine_without_priorities_does_not_change_the_queues_order() -> None:
    for engine, expected in ((CAPABILITIES, 7), (without(priority=False), 0)):
        desk = Desk(capabilities=engine)
        desk.accept(FakeCeleryRequest(priority=7, step=6))
        assert [request.priority for request in desk.engine.sent] == [expected]


# -- draws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("draws", "written"), [("fake-1", "fake-1"), (None, "")])
def test_a_start_names_the_draws_of_the_engine(draws: str | None, written: str) -> None:
    desk = Desk(capabilities=without(draws=draws))
    desk.accept(FakeCeleryRequest())
    [(_, _, kind, data)] = desk.redis.entries("r1")
    assert (kind, data["draws"]) == ("start", written)


@pytest.mark.parametrize(
    ("earlier", "engine"),
    [
        (begun("vllm-0.31-v2"), CAPABILITIES),
        (begun(""), CAPABILITIES),
        (begun("fake-1"), without(draws=None)),
        (begun(""), without(draws=None)),
        (begun("fake-1"), without(exact_resume="greedy")),
    ],
)
def test_a_sampled_request_resumed_with_other_draws_is_counted_and_logged(
    earlier: Any, engine: EngineCapabilities, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    desk = resume(earlier, engine=engine)
    assert desk.value(RESUMED) == 1
    assert len(desk.engine.sent) == 1
    assert "request resumed with other draws" in caplog.text
    assert resume(earlier, GREEDY, engine).value(RESUMED) == 0


@pytest.mark.parametrize(
    "earlier",
    [
        [],
        begun("fake-1"),
        begun(None),  # of an older worker
        begun("vllm-0.31-v2", tokens=0),
        begun("vllm-0.31-v2", finish_reason="stop"),  # nothing is left to draw
    ],
)
def test_a_sampled_request_whose_draws_do_not_change_is_not_counted(earlier: Any) -> None:
    assert resume(earlier).value(RESUMED) == 0


def test_an_engine_without_exact_resume_is_counted_after_its_own_death_too() -> None:
    for engine, counted in ((CAPABILITIES, 0), (without(exact_resume="greedy"), 1), (without(draws=None), 1)):
        desk = Desk(capabilities=engine)
        desk.accept(FakeCeleryRequest("r1", SAMPLED))
        desk.accept(FakeCeleryRequest("r2", GREEDY))
        desk.generate(13, 13)
        desk.accept(FakeCeleryRequest("r3", SAMPLED))  # without a token there is nothing to resume
        desk.watch.on_engine_lost("killed", "crash", was_ready=True)
        desk.engine.sent.clear()
        desk.watch.on_engine_ready(MODEL, engine)
        assert len(desk.engine.sent) == 3
        assert desk.value(RESUMED) == counted


# -- engines that end the worker --------------------------------------------------------------------------------------


def test_a_replaced_engine_resumes_nothing_and_ends_the_worker() -> None:
    desk = Desk(engine="vllm")
    request = desk.accept(FakeCeleryRequest())
    desk.generate(13)
    desk.watch.on_engine_lost("killed", "crash", was_ready=True)
    desk.engine.sent.clear()
    desk.watch.on_engine_ready(MODEL, without(draws="vllm-0.33-v2"))
    assert desk.engine.sent == []
    assert request.fate == ["accepted", "requeued"]
    assert "the engine vllm was replaced while the worker ran" in desk.given_up[0]
    assert desk.admission.free_slots() == 0


def test_an_engine_that_cannot_separate_tenants_needs_a_shared_cache() -> None:
    desk = Desk(engine="other", capabilities=without(cache_salt=False))
    assert (
        "the engine other cannot separate the prefix caches of tenants: set HEADRACE_SHARE_PREFIX_CACHE=true"
        in (desk.given_up[0])
    )
    assert desk.admission.free_slots() == 0
    shared = Desk(capabilities=without(cache_salt=False), share_prefix_cache=True)
    shared.accept(FakeCeleryRequest(tenant="acme"))
    assert shared.given_up == []
    assert [request.cache_salt for request in shared.engine.sent] == [""]


# -- statistics of the engine -----------------------------------------------------------------------------------------


def test_statistics_that_the_engine_does_not_report_are_in_no_metric_or_table() -> None:
    desk = Desk(engine="vllm", capabilities=without(stats=("running", "waiting"), version="0.32.0"))
    desk.accept(FakeCeleryRequest())
    desk.generate(13)
    scrape = Scrape(desk.metrics)
    assert {name for name in SOURCES if any(found.startswith(name) for found in scrape.names)} == {
        "headrace_engine_requests"
    }
    assert scrape.value("headrace_model_info", engine="vllm", engine_version="0.32.0") == 1
    engine = desk.dispatcher.stats()["engine"]
    assert (engine["name"], engine["waiting"], engine["kv_blocks_used"]) == ("vllm", 0, None)
    found = report(Sample(0.0, {}, {"w": desk.dispatcher.stats()}), None)
    assert found["workers"][0]["kv_cache_usage_ratio"] is None
    draw(found)


def test_our_own_engine_shows_its_use_of_memory_in_the_table_of_workers() -> None:
    desk = Desk()
    desk.watch.on_engine_outputs(EngineCoreOutputs(outputs=[], stats=StepStats(kv_blocks_used=3, kv_blocks_total=4)))
    found = report(Sample(0.0, {}, {"w": desk.dispatcher.stats()}), None)
    assert found["workers"][0]["kv_cache_usage_ratio"] == 0.75


# -- free slots --------------------------------------------------------------------------------------------------------


def test_an_engine_without_statistics_takes_as_many_as_it_has_free_slots() -> None:
    desk = Desk(capabilities=without(stats=()), max_num_seqs=2)
    desk.accept(FakeCeleryRequest("r1"))
    desk.accept(FakeCeleryRequest("r2"))
    assert desk.admission.free_slots() == 0
    desk.generate(13, 13)
    assert desk.admission.free_slots() == 0
    desk.generate(14, 14, finish=FinishReason.LENGTH)
    assert desk.admission.free_slots() == 2


def test_requests_waiting_for_engine_memory_keep_others_in_the_queue() -> None:
    desk = Desk(capabilities=without(stats=("running", "waiting")), max_num_seqs=8)
    for name in ("r1", "r2", "r3"):
        desk.accept(FakeCeleryRequest(name))
    desk.generate(13, 13, 13, waiting=1)  # one of them was preempted, or was never admitted
    assert desk.admission.free_slots() == 0
    desk.generate(14, 14, 14, finish=FinishReason.LENGTH)
    assert desk.admission.free_slots() == 8
