"""Tenants that share a real worker."""

from collections.abc import Callable

from celery.result import AsyncResult

from headrace_broker.queue_levels import QueueLevelReader
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
    results([light, plain])
    waiting = QueueLevelReader(service.client).read([QUEUE])[QUEUE].num_ready
    assert waiting >= 20
    assert len(results(backlog)) == 30
    service.wait_settled()


def test_a_tenant_pays_for_the_tokens_of_its_requests(make_service: Callable[..., Service]) -> None:
    service = make_service()
    service.start_worker(tenant_weights="acme=2")
    result = send(service, "acme", max_tokens=30).get(timeout=DEADLINE)
    tokens = result["usage"]["prompt_tokens"] + result["usage"]["completion_tokens"]
    service.wait_settled()
    assert service.client.zscore(f"headrace:share:costs:{QUEUE}", "acme") == tokens
    assert service.client.zscore(f"headrace:share:served:{QUEUE}", "acme") == tokens / 2


def test_what_a_stock_producer_sends_over_its_tenants_quota_ends_with_an_error(
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
        "message": "the queue holds 3 requests of this tenant, which is as many as it may",
    }
    log = service.wait_ended([refused.id])[refused.id]
    assert log.end is not None
    assert (log.end["finish_reason"], log.end["error"]) == ("rejected", error)
    assert all(result["error"] is None for result in results([*accepted, other]).values())
    service.wait_settled()
    assert service.dead_letters() == []
