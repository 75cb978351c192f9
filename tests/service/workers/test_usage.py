"""The usage ledger of a real worker: what it counts equals the results, also after faults."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from celery.result import AsyncResult
from click.testing import CliRunner

from headrace_broker.usage.ledger import DAY, UsageCounts, Usages, read_usage
from headrace_cli.commands.usage import usage
from service.workers.service import Service, results

MakeService = Callable[..., Service]
NUM_REQUESTS = 24


def send(service: Service, number: int, tokens: int = 60, **headers: Any) -> AsyncResult:
    params = {"temperature": 0.0, "max_tokens": tokens + number % 5, "ignore_eos": True, "n": 1 + number % 2}
    if number % 2:
        params |= {"temperature": 0.9, "seed": number}
    headers = {"tenant": f"t{number % 3}", "key_name": f"k{number % 2}", **headers}
    return service.send({"prompt": f"The wheel turns {number} times", "sampling_params": params}, headers=headers)


def ledger(service: Service) -> Usages:
    now = service.client.time()[0]
    return read_usage([service.client], DAY, now - DAY, now + DAY)


def sums(found: list[dict[str, Any]]) -> tuple[int, ...]:
    usages = [result["usage"] for result in found]
    names = ("prompt_tokens", "cached_tokens", "completion_tokens")
    return (len(usages), *(sum(usage[name] for usage in usages) for name in names))


def total(found: Usages) -> UsageCounts:
    counts = UsageCounts()
    for each in found.values():
        counts = counts.plus(each)
    return counts


def counted(counts: UsageCounts) -> tuple[int, ...]:
    return counts.requests, counts.prompt_tokens, counts.cached_tokens, counts.completion_tokens


def test_the_ledger_equals_the_results_after_kill_9_in_the_middle(make_service: MakeService) -> None:
    service = make_service()
    settings = {"lease_seconds": 2.0, "max_num_seqs": 16}
    first = service.start_worker(**settings)
    handles = [send(service, number, 200) for number in range(NUM_REQUESTS)]
    service.wait_until(lambda: sum(service.stream(handle.id).num_tokens > 20 for handle in handles) >= 8)
    first.kill()
    service.start_worker(**settings)
    found = results(handles)
    service.wait_settled()
    used = ledger(service)
    assert counted(total(used)) == sums(list(found.values()))
    assert total(used).attempts > NUM_REQUESTS, "some were resumed"
    for number in range(3):
        own = [found[handle.id] for place, handle in enumerate(handles) if place % 3 == number]
        of_tenant = {group: counts for group, counts in used.items() if group.tenant == f"t{number}"}
        assert counted(total(of_tenant)) == sums(own)
        assert {group.key_name for group in of_tenant} == {"k0", "k1"}


def test_cancelled_and_refused_requests_count_with_the_tokens_they_have(make_service: MakeService) -> None:
    service = make_service()
    service.start_worker()
    refused = service.send({"prompt": "x", "sampling_params": {"max_tokens": -1}}, headers={"tenant": "t"})
    assert results([refused])[refused.id]["error"]["code"] == "invalid_request"
    service.wait_settled()
    assert counted(total(ledger(service))) == (1, 0, 0, 0)


def test_the_command_prints_a_row_for_each_tenant_key_and_model(make_service: MakeService) -> None:
    service = make_service()
    service.start_worker()
    handles = [send(service, number, 4, key_name=None) for number in range(3)]
    found = results(handles)
    service.wait_settled()
    run = partial(CliRunner().invoke, usage, env={"HEADRACE_REDIS_URL": service.url})
    rows = json.loads(run(["--json"]).stdout)
    assert [(row["tenant"], row["key"], row["model"], row["endpoint"]) for row in rows] == [
        (f"t{number}", "", "tiny", "completions") for number in range(3)
    ]
    for row, handle in zip(rows, handles, strict=True):
        assert row["requests"] == 1
        assert row["completion_tokens"] == found[handle.id]["usage"]["completion_tokens"]
        assert row["by_priority"]["0"]["requests"] == 1
        assert row["seconds"] > 0
    shown = run(["--tenant", "t1"]).stdout
    assert "t1" in shown
    assert "t2" not in shown
    wrong = run(["--from", "2026-02-01", "--to", "2026-01-01"])
    assert wrong.exit_code == 2
    assert "--from must not be after --to, got 2026-02-01 and 2026-01-01" in wrong.output
