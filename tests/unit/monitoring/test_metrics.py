"""What the verbs of `Metrics` do to the exposition."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from headrace_monitoring import buckets
from headrace_monitoring.exposition import ExpositionFormat
from headrace_monitoring.labels import LabelSets
from headrace_monitoring.metrics import LONGEST_SECONDS, Metrics, Publication
from headrace_wire.codes import FINISH_REASONS
from unit.monitoring.scrape import STEP, Clock, Scrape, calls_by_the_standard_writer


def test_every_family_has_its_children_before_anything_happened(metrics: Metrics) -> None:
    scrape = Scrape(metrics)
    assert [family.name for family in scrape.families if not family.samples] == []
    for outcome in FINISH_REASONS:
        assert scrape.value("headrace_requests_total", model="tiny", outcome=outcome) == 0
    for reason in ("crash", "stall", "out_of_memory", "recompilation", "other"):
        assert scrape.value("headrace_engine_restarts_total", reason=reason) == 0


def test_no_series_appears_that_the_first_scrape_did_not_have(metrics: Metrics) -> None:
    before = set(Scrape(metrics).samples)
    metrics.message_received(priority=5, wait_seconds=0.3)
    metrics.message_redelivered()
    metrics.dead_lettered("a reason nobody foresaw")
    metrics.request_started()
    metrics.first_token(0.4, 0.1)
    metrics.published(Publication(3, Counter({(2, 0.05, None): 1}), 0.01, 0.02))
    metrics.step(STEP)
    metrics.request_admitted(0.1)
    metrics.request_finished("stop", 1.5, prompt_tokens=20, cached_tokens=8, generation_tokens=3, tenant="nobody knows")
    metrics.request_refused("rejected", "nobody knows")
    metrics.loop_lag(0.01)
    metrics.entries_written(3, 0.001)
    metrics.engine_up(True)
    metrics.engine_restarted("cosmic ray")
    metrics.worker_state("ready")
    metrics.slots(3, 8)
    metrics.redis_command("an unheard-of command", 0.001)
    metrics.redis_error("an unheard-of command")
    metrics.redis_up(True)
    metrics.heartbeat()
    metrics.queue_depth(5, 3, 1, 12.5)
    assert set(Scrape(metrics).samples) == before


def test_families_follow_the_naming_rules(metrics: Metrics) -> None:
    for family in Scrape(metrics).families:
        assert family.documentation, family.name
        if not family.name.startswith("headrace_"):
            assert family.name.startswith("process_")
            continue
        assert all("model" in sample.labels for sample in family.samples), family.name
        assert not any(sample.name.endswith("_created") for sample in family.samples), family.name
        if family.type == "histogram":
            assert family.name.endswith(("_seconds", "_tokens", "_requests")), family.name


def test_objectives_are_bucket_bounds() -> None:
    assert buckets.TIME_TO_FIRST_TOKEN_OBJECTIVE in buckets.TIME_TO_FIRST_TOKEN
    assert buckets.INTER_TOKEN_LATENCY_OBJECTIVE in buckets.INTER_TOKEN_LATENCY
    assert buckets.QUEUE_WAIT_OBJECTIVE in buckets.QUEUE_WAIT


def test_the_registry_passed_in_is_the_one_that_is_fed() -> None:
    registry = CollectorRegistry()
    Metrics(registry, model="m", queue="q", version="9")
    assert registry.get_sample_value("headrace_build_info", {"model": "m", "version": "9"}) == 1


@pytest.mark.parametrize(("priority", "step"), [(0, "0"), (2, "0"), (3, "3"), (5, "3"), (9, "9"), (-1, "0"), (99, "9")])
def test_a_priority_counts_on_the_queue_list_it_lands_in(metrics: Metrics, priority: int, step: str) -> None:
    metrics.message_received(priority, 0.2)
    assert Scrape(metrics).value("headrace_queue_wait_seconds_count", priority=step) == 1


def test_a_message_without_an_enqueue_time_is_counted_but_not_timed(metrics: Metrics) -> None:
    metrics.message_received(0, None)
    scrape = Scrape(metrics)
    assert scrape.value("headrace_queue_received_messages_total") == 1
    assert scrape.value("headrace_queue_wait_seconds_count", priority="0") == 0


@given(seconds=st.floats())
@settings(deadline=None)
def test_no_enqueue_time_can_spoil_a_sum(seconds: float) -> None:
    metrics = Metrics(model="m", queue="q")
    metrics.first_token(seconds, 0.1)
    total = Scrape(metrics).value("headrace_time_to_first_token_seconds_sum")
    assert math.isfinite(total)
    assert 0 <= total <= 30 * 24 * 3600


def test_requests_in_flight_are_those_started_and_neither_finished_nor_requeued(metrics: Metrics) -> None:
    for _ in range(4):
        metrics.request_started()
    metrics.request_finished("cancelled", 1.0, prompt_tokens=5, cached_tokens=0, generation_tokens=1)
    metrics.request_requeued()
    metrics.request_refused("rejected")
    scrape = Scrape(metrics)
    assert scrape.value("headrace_requests_in_flight") == 2
    assert scrape.value("headrace_requests_total", outcome="cancelled") == 1
    assert scrape.value("headrace_requests_total", outcome="rejected") == 1


def test_only_served_requests_enter_the_duration_and_length_histograms(metrics: Metrics) -> None:
    for outcome in FINISH_REASONS:
        metrics.request_started()
        metrics.request_finished(outcome, 2.0, prompt_tokens=10, cached_tokens=4, generation_tokens=7)
    scrape = Scrape(metrics)
    for histogram in ("request_duration_seconds", "request_prompt_tokens", "request_generation_tokens"):
        assert scrape.value(f"headrace_{histogram}_count") == 2  # stop and length
    assert scrape.value("headrace_prompt_tokens_total", source="cached") == 4 * len(FINISH_REASONS)
    assert scrape.value("headrace_prompt_tokens_total", source="computed") == 6 * len(FINISH_REASONS)


def test_a_chunk_of_several_tokens_counts_as_equal_gaps(metrics: Metrics) -> None:
    metrics.published(Publication(4, Counter({(4, 0.2, None): 1})))
    scrape = Scrape(metrics)
    assert scrape.value("headrace_inter_token_latency_seconds_count") == 4
    assert scrape.value("headrace_inter_token_latency_seconds_bucket", le="0.05") == 4
    assert scrape.value("headrace_inter_token_latency_seconds_sum") == pytest.approx(0.2)


@pytest.mark.parametrize("seconds", [0.0, 0.1, buckets.INTER_TOKEN_LATENCY[0], 1e9])
def test_chunks_of_a_step_count_as_each_by_itself(metrics: Metrics, seconds: float) -> None:
    metrics.published(Publication(6, Counter({(2, seconds, None): 3})))
    together = Scrape(metrics).samples
    one_by_one = Metrics(model=metrics._model, queue=f"headrace.{metrics._model}")
    for _ in range(6):
        one_by_one._generations.inter_token_latency.observe(min(seconds, LONGEST_SECONDS) / 2)
    expected = Scrape(one_by_one).samples
    for name in [name for name in expected if "inter_token" in str(name)]:
        assert together[name] == pytest.approx(expected[name])


def test_a_worker_shows_the_families_of_its_kind_of_model_alone(metrics: Metrics) -> None:
    metrics.published(Publication(4, pooled=Counter(embed=3, score=1), num_truncated=2))
    both = {name for name, _ in Scrape(metrics).samples}
    metrics.show_kinds(generates=False, pools=True)
    scrape = Scrape(metrics)
    assert scrape.value("headrace_pooled_inputs_total", task="embed") == 3
    assert scrape.value("headrace_truncated_inputs_total") == 2
    of_pooling = {name for name, _ in scrape.samples}
    metrics.show_kinds(generates=True, pools=False)
    of_generations = {name for name, _ in Scrape(metrics).samples}
    assert both - of_generations == {"headrace_pooled_inputs_total", "headrace_truncated_inputs_total"}
    hidden = {
        name.removeprefix("headrace_").removesuffix("_sum") for name in both - of_pooling if name.endswith("_sum")
    }
    assert hidden == {
        "time_to_first_token_seconds",
        "engine_time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_generation_tokens",
        "request_time_per_output_token_seconds",
        "engine_decode_seconds",
    }


def test_a_traced_chunk_is_an_exemplar_of_one_of_its_gaps(metrics: Metrics) -> None:
    metrics.published(Publication(4, Counter({(4, 0.2, "0af7651916cd43dd8448eb211c80319c"): 1})))
    assert Scrape(metrics).value("headrace_inter_token_latency_seconds_count") == 4
    exposition = metrics.exposition(ExpositionFormat.OPENMETRICS).decode()
    assert exposition.count("0af7651916cd43dd8448eb211c80319c") == 1


def test_a_step_adds_its_counts_and_sets_its_levels(metrics: Metrics, clock: Clock) -> None:
    clock.now = 2000.0
    metrics.step(STEP)
    metrics.step(replace(STEP, running=1, waiting=0))
    scrape = Scrape(metrics)
    assert scrape.value("headrace_engine_step_seconds_count", kind="mixed") == 2
    assert scrape.value("headrace_engine_step_tokens_sum") == 240
    assert scrape.value("headrace_engine_step_requests_sum") == 8
    assert scrape.value("headrace_engine_phase_seconds_total", phase="forward") == pytest.approx(0.03)
    assert scrape.value("headrace_engine_requests", state="running") == 1
    assert scrape.value("headrace_kv_cache_blocks", state="cached") == 10
    assert scrape.value("headrace_kv_cache_usage_ratio") == 0.3
    assert scrape.value("headrace_prefix_cache_queried_tokens_total") == 200
    assert scrape.value("headrace_prefix_cache_hit_tokens_total") == 96
    assert scrape.value("headrace_engine_preemptions_total") == 2
    assert scrape.value("headrace_engine_padded_tokens_total") == 22
    assert scrape.value("headrace_engine_compiled_graphs") == 8
    assert scrape.value("headrace_engine_fallback_operators") == 1
    assert scrape.value("headrace_engine_warm_up_seconds") == 2.5
    assert [scrape.value("headrace_draft_tokens_total", position=place) for place in "1234"] == [8, 6, 6, 0]
    assert [scrape.value("headrace_draft_accepted_tokens_total", position=place) for place in "1234"] == [6, 2, 0, 0]
    assert scrape.value("headrace_engine_last_step_timestamp_seconds") == 2000.0


def test_requests_with_adapters_are_counted_under_the_names_that_the_operator_gave(metrics: Metrics) -> None:
    metrics.step(STEP)
    scrape = Scrape(metrics)
    family = "headrace_engine_lora_requests"
    assert [scrape.value(family, adapter="sql", state=state) for state in ("running", "waiting")] == [2, 1]
    assert [scrape.value(family, adapter="other", state=state) for state in ("running", "waiting")] == [1, 3]
    assert b"unheard-of" not in metrics.exposition()
    metrics.step(replace(STEP, lora_requests={}))
    assert Scrape(metrics).value(family, adapter="sql", state="running") == 0


def test_a_step_without_tokens_is_no_batch(metrics: Metrics) -> None:
    metrics.step(replace(STEP, num_tokens=0, num_requests=0, kind="decode"))
    scrape = Scrape(metrics)
    assert scrape.value("headrace_engine_step_seconds_count", kind="decode") == 0
    assert scrape.value("headrace_engine_step_tokens_count") == 0
    assert scrape.value("headrace_engine_requests", state="waiting") == 2


@pytest.mark.parametrize(
    ("reason", "counted"),
    [("undecodable: ValueError", "undecodable"), ("delivery limit", "delivery_limit"), ("bad luck", "other")],
)
def test_a_dead_letter_counts_under_its_kind_of_reason(metrics: Metrics, reason: str, counted: str) -> None:
    metrics.dead_lettered(reason)
    assert Scrape(metrics).value("headrace_queue_dead_lettered_messages_total", reason=counted) == 1


def test_an_engine_that_is_gone_holds_nothing(metrics: Metrics) -> None:
    metrics.engine_up(True)
    metrics.step(STEP)
    metrics.engine_up(False)
    scrape = Scrape(metrics)
    assert scrape.value("headrace_engine_up") == 0
    assert scrape.value("headrace_engine_requests", state="running") == 0
    assert scrape.value("headrace_kv_cache_blocks", state="used") == 0
    assert scrape.value("headrace_kv_cache_usage_ratio") == 0


def test_an_engine_that_just_came_up_does_not_look_stalled(metrics: Metrics, clock: Clock) -> None:
    clock.now = 5000.0
    metrics.engine_up(True)
    assert Scrape(metrics).value("headrace_engine_last_step_timestamp_seconds") == 5000.0


def test_the_limit_of_a_step_is_the_engines_own() -> None:
    metrics = Metrics(model="m", queue="q", stall_limit=300.0)
    assert Scrape(metrics).value("headrace_engine_stall_limit_seconds") == 300


def test_a_worker_is_in_one_state_at_a_time(metrics: Metrics) -> None:
    for state in ("loading", "ready", "draining"):
        metrics.worker_state(state)
        scrape = Scrape(metrics)
        states = {name: scrape.value("headrace_worker_state", state=name) for name in ("loading", "ready", "draining")}
        assert states == {name: float(name == state) for name in states}


def test_slots_are_used_or_free(metrics: Metrics) -> None:
    metrics.slots(3, 8)
    scrape = Scrape(metrics)
    assert scrape.value("headrace_worker_slots", state="used") == 3
    assert scrape.value("headrace_worker_slots", state="free") == 5


def test_an_empty_queue_is_shown_as_zero(metrics: Metrics) -> None:
    metrics.queue_depth(7, 1, 3, 60.0)
    metrics.queue_depth(0, 0, 0, None)
    scrape = Scrape(metrics)
    assert scrape.value("headrace_queue_messages", queue="headrace.tiny", state="ready") == 0
    assert scrape.value("headrace_queue_oldest_message_age_seconds") == 0


def test_a_dead_letter_of_an_unknown_reason_counts_as_other(metrics: Metrics) -> None:
    metrics.dead_lettered("poison: it killed two engines")
    metrics.dead_lettered("bad_body")
    scrape = Scrape(metrics)
    assert scrape.value("headrace_queue_dead_lettered_messages_total", reason="poison") == 1
    assert scrape.value("headrace_queue_dead_lettered_messages_total", reason="other") == 1


def test_redis_round_trips_and_errors_are_told_by_command(metrics: Metrics) -> None:
    metrics.redis_command("publish", 0.002)
    metrics.redis_error("publish")
    metrics.redis_up(True)
    scrape = Scrape(metrics)
    assert scrape.value("headrace_redis_command_seconds_count", command="publish") == 1
    assert scrape.value("headrace_redis_errors_total", command="publish") == 1
    assert scrape.value("headrace_redis_up") == 1


def test_the_stages_of_a_request_are_told_apart(metrics: Metrics) -> None:
    metrics.request_started()
    metrics.request_admitted(0.2)
    metrics.first_token(1.0, 0.5, 0.3)
    metrics.request_finished("stop", 3.0, 10, 0, 5, decode_seconds=2.0, decoded_tokens=4)
    scrape = Scrape(metrics)
    for stage, seconds in {"queue": 0.2, "prefill": 0.3, "decode": 2.0}.items():
        assert scrape.value(f"headrace_engine_{stage}_seconds_sum") == pytest.approx(seconds)
    assert scrape.value("headrace_request_time_per_output_token_seconds_sum") == pytest.approx(0.5)


def test_a_single_token_has_no_time_per_token(metrics: Metrics) -> None:
    metrics.request_started()
    metrics.request_finished("stop", 3.0, 10, 0, 1, decode_seconds=0.0, decoded_tokens=0)
    assert Scrape(metrics).value("headrace_request_time_per_output_token_seconds_count") == 0


def test_only_tenants_that_the_operator_named_have_series() -> None:
    metrics = Metrics(model="m", queue="q", label_sets=LabelSets(tenants=("acme",)))
    for tenant in ("acme", "somebody", "somebody else", None):
        metrics.message_received(0, 0.5, tenant)
        metrics.request_started()
        metrics.request_finished("stop", 1.0, 10, 0, 3, tenant=tenant)
    scrape = Scrape(metrics)
    for tenant, requests in {"acme": 1, "other": 2, "none": 1}.items():
        assert scrape.value("headrace_tenant_requests_total", tenant=tenant, outcome="stop") == requests
        assert scrape.value("headrace_tenant_tokens_total", tenant=tenant, kind="generated") == 3 * requests
        assert scrape.value("headrace_tenant_queue_wait_seconds_count", tenant=tenant) == requests
    assert {dict(labels).get("tenant") for _, labels in scrape.samples} == {"acme", "other", "none", None}


def test_fifty_tenants_cost_a_scrape_under_half_the_calls_of_the_standard_writer_and_keep_to_the_stated_bound() -> None:
    none = Metrics(model="m", queue="q")
    fifty = Metrics(model="m", queue="q", label_sets=LabelSets(tenants=tuple(f"tenant-{i}" for i in range(50))))
    assert len(Scrape(none).samples) <= 620
    assert len(Scrape(fifty).samples) - len(Scrape(none).samples) == 19 * 50
    for form in ExpositionFormat:
        assert calls_by_the_standard_writer(fifty, form) < 0.5


def test_the_model_is_described_as_the_engine_loaded_it(metrics: Metrics) -> None:
    loaded = {"architecture": "Llama", "dtype": "bfloat16", "device": "cpu", "attention": "native"}
    metrics.model_loaded(**loaded, engine="vllm", engine_version="0.32.0")
    scrape = Scrape(metrics)
    assert scrape.value("headrace_model_info", **loaded, engine="vllm", engine_version="0.32.0") == 1


def test_lost_leases_are_counted(metrics: Metrics) -> None:
    metrics.lease_lost()
    assert Scrape(metrics).value("headrace_leases_lost_total", queue="headrace.tiny") == 1


def test_queued_messages_are_counted_for_named_tenants_and_the_others_together() -> None:
    metrics = Metrics(model="m", queue="q", label_sets=LabelSets(tenants=("acme", "beta")))
    metrics.tenants_queued({"acme": 3, "stranger": 4, "foreigner": 1, "": 2})
    scrape = Scrape(metrics)
    found = {
        tenant: scrape.value("headrace_tenant_queued_messages", tenant=tenant)
        for tenant in ("acme", "beta", "other", "none")
    }
    assert found == {"acme": 3, "beta": 0, "other": 5, "none": 2}
