"""Tenants that share a real worker."""

from collections.abc import Callable

from celery.result import AsyncResult

from headrace_broker.queue_levels import QueueLevelReader
from service.workers.service import QUEUE, Service, results


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
    result = send(service, "acme", max_tokens=30).get(timeout=150)
    tokens = result["usage"]["prompt_tokens"] + result["usage"]["completion_tokens"]
    service.wait_settled()
    assert service.client.zscore(f"headrace:share:costs:{QUEUE}", "acme") == tokens
    assert service.client.zscore(f"headrace:share:served:{QUEUE}", "acme") == tokens / 2
