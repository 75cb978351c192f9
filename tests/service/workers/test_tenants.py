"""Tenants that share a real worker."""

import json
from collections.abc import Callable

from celery.result import AsyncResult

from service.workers.service import DEADLINE, QUEUE, Service, results


def send(service: Service, tenant: str | None, **params: object) -> AsyncResult:
    params = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **params}
    headers = {} if tenant is None else {"tenant": tenant}
    return service.send({"prompt": "the wheel", "sampling_params": params}, headers=headers)


def test_a_light_tenants_request_is_served_before_a_heavy_tenants_backlog(
    make_service: Callable[..., Service],
) -> None:
    service = make_service()
    backlog = [send(service, "heavy", max_tokens=20) for _ in range(30)]
    light = send(service, "light")
    plain = send(service, None)
    service.start_worker(max_num_seqs=1)
    assert len(results([*backlog, light, plain])) == 32
    for early in (light, plain):
        assert sum(handle.date_done < early.date_done for handle in backlog) < 10
    service.wait_settled()


def test_a_tenant_is_charged_for_the_tokens_of_its_requests(make_service: Callable[..., Service]) -> None:
    service = make_service()
    service.start_worker(tenant_weights="acme=2")
    result = send(service, "acme", max_tokens=30).get(timeout=DEADLINE)
    tokens = result["usage"]["prompt_tokens"] + result["usage"]["completion_tokens"]
    service.wait_settled()
    assert service.client.zscore(f"headrace:share:costs:{QUEUE}", "acme") == tokens
    assert service.client.zscore(f"headrace:share:served:{QUEUE}", "acme") == tokens / 2


def test_requests_with_more_choices_than_the_engine_has_slots_do_not_delay_another_tenant(
    make_service: Callable[..., Service],
) -> None:
    service = make_service()
    heavy = [send(service, "heavy", n=16, temperature=1.0, max_tokens=30) for _ in range(6)]
    worker = service.start_worker(max_num_seqs=4)
    service.wait_until(lambda: any(service.stream(handle.id).num_tokens for handle in heavy))
    light = send(service, "light")
    assert {len(result["outputs"]) for result in results([*heavy, light]).values()} == {1, 16}
    assert sum(handle.date_done < light.date_done for handle in heavy) <= 1
    assert worker.metrics()['headrace_queue_returned_messages_total{reason="no_room"}'] >= 1
    service.wait_settled()


def test_a_request_of_a_stock_producer_over_its_tenants_quota_ends_with_an_error(
    make_service: Callable[..., Service],
) -> None:
    service = make_service()
    accepted = [send(service, "acme") for _ in range(3)]
    refused = send(service, "acme")
    other = send(service, "other")
    service.start_worker(max_queued_requests_per_tenant=3)
    error = refused.get(timeout=DEADLINE)["error"]
    assert error == {
        "code": "quota_exceeded",
        "message": "the queue holds 3 requests of this tenant, which is its limit",
    }
    log = service.wait_ended([refused.id])[refused.id]
    assert log.end is not None
    assert (log.end["finish_reason"], log.end["error"]) == ("rejected", error)
    assert all(result["error"] is None for result in results([*accepted, other]).values())
    service.wait_settled()
    assert service.dead_letters() == []


def cached(service: Service, tenant: str | None, prompt: list[int], **headers: str) -> int:
    headers |= {} if tenant is None else {"tenant": tenant}
    params = {"temperature": 0.0, "max_tokens": 1}
    sent = service.send({"prompt_token_ids": prompt, "sampling_params": params}, headers=headers)
    tokens: int = sent.get(timeout=DEADLINE)["usage"]["cached_tokens"]
    return tokens


def test_a_tenant_does_not_hit_the_prefix_cache_of_another(
    make_service: Callable[..., Service],
) -> None:
    service = make_service()
    service.start_worker()
    prompt = [5 + number % 50 for number in range(200)]
    assert [cached(service, tenant, prompt) for tenant in ("a", "b", None)] == [0, 0, 0]
    assert all(cached(service, tenant, prompt) >= 128 for tenant in ("a", "b", None))
    for tenant in ("a", None):
        for salt in ("a", "b", ""):
            assert cached(service, tenant, prompt, cache_salt=salt) == 0
            assert cached(service, tenant, prompt, cache_salt=salt) >= 128


def test_tenants_share_the_prefix_cache_if_the_setting_says_so(make_service: Callable[..., Service]) -> None:
    service = make_service()
    service.start_worker(share_prefix_cache=True)
    prompt = [5 + number % 50 for number in range(200)]
    assert cached(service, "a", prompt) == 0
    assert all(cached(service, tenant, prompt) >= 128 for tenant in ("b", None))


def test_slow_grammars_of_one_tenant_do_not_delay_a_request_of_another(make_service: Callable[..., Service]) -> None:
    service = make_service()
    service.start_worker(lease_seconds=2).wait_ready()
    send(service, "light").get(timeout=DEADLINE)
    schemas = [json.dumps({"type": "integer", "multipleOf": 999983 - 2 * number}) for number in range(6)]
    slow = [send(service, "heavy", structured_outputs={"json": schema}) for schema in schemas]
    light = send(service, "light")
    outcomes = results(slow)
    assert light.get(timeout=DEADLINE)["error"] is None
    assert light.date_done < slow[-1].date_done
    assert {result["error"]["code"] for result in outcomes.values()} == {"invalid_request"}
    assert service.workers[0].metrics()["headrace_leases_lost_total"] == 0
    service.wait_settled()
