"""The usage API and the budgets of API keys, on a real gateway and a real worker."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from openai.types.admin.organization import UsageCompletionsResponse, UsageEmbeddingsResponse

from headrace_broker import GenerateRequest
from headrace_broker.keys import reserved_key, spent_key
from headrace_broker.usage.ledger import DAY, HOUR
from headrace_gateway.keys.key_file import new_key
from headrace_gateway.requests.token_bound import most_tokens
from service.gateway.gateway_process import GatewayProcess
from service.servers import make_server
from service.workers.conftest import MAX_MODEL_LEN
from service.workers.service import DEADLINE, Service

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
RIGHTS = {
    "admin": "admin = true",
    "web": 'tenant = "acme"',
    "app": 'tenant = "acme"',
    "other": 'tenant = "beta"',
    "small": "tokens_per_day = 1500",
    "spent": "tokens_per_day = 1",
    "batch": "tokens_per_day = 1",
    "left": "tokens_per_day = 100000",
    "retried": "tokens_per_day = 1",
}


@dataclass(frozen=True)
class Keyed:
    """A gateway with a key file before one worker."""

    service: Service
    replica: GatewayProcess
    keys: dict[str, str]
    clients: dict[str, openai.OpenAI] = field(default_factory=dict)

    def client(self, key: str) -> openai.OpenAI:
        if key not in self.clients:
            secret, url = self.keys[key], f"{self.replica.url}/v1"
            self.clients[key] = openai.OpenAI(base_url=url, api_key=secret, admin_api_key=secret, max_retries=0)
        return self.clients[key]

    def spent(self, key: str) -> int:
        today = self.service.client.time()[0] // DAY * DAY
        return int(self.service.client.hget(spent_key(today), key) or 0)


@pytest.fixture(scope="module")
def keyed(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    folder = tmp_path_factory.mktemp("keyed")
    made = {name: new_key(name) for name in RIGHTS}
    (folder / "keys").write_text("".join(f"{entry}{RIGHTS[name]}\n" for name, (_, entry) in made.items()))
    with make_server() as server:
        service = Service(server, model_folder, folder)
        replica = GatewayProcess(
            redis_url=server.url, log=folder / "gateway.log", keys=folder / "keys", files=folder / "files"
        )
        try:
            service.start_worker().wait_ready()
            site = Keyed(service, replica.wait_ready(), {name: key for name, (key, _) in made.items()})
            yield site
            for client in site.clients.values():
                client.close()
        finally:
            replica.close()
            service.close()


def chat(client: openai.OpenAI, max_tokens: int = 5) -> Any:
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "extra_body": {"ignore_eos": True}}
    return client.chat.completions.create(max_tokens=max_tokens, **options)


def test_the_usage_api_gives_what_the_answers_said(keyed: Keyed) -> None:
    start = int(time.time()) - HOUR
    answers = {name: [chat(keyed.client(name), tokens) for tokens in (3, 4)] for name in ("web", "app", "other")}
    keyed.service.wait_settled()
    usage = keyed.client("admin").admin.organization.usage
    names: dict[str, Any] = {"group_by": ["project_id", "api_key_id", "model"], "project_ids": ["acme", "beta"]}
    for width, limit in (("1h", 168), ("1d", 31)):
        raw = usage.with_raw_response.completions(start_time=start, bucket_width=width, limit=limit, **names)
        page = UsageCompletionsResponse.model_validate_json(raw.text, strict=True)
        found = [result for bucket in page.data for result in bucket.results]
        for name, tenant in (("web", "acme"), ("app", "acme"), ("other", "beta")):
            own = [each for each in found if each.api_key_id == name]
            assert {(each.project_id, each.model) for each in own} == {(tenant, "tiny")}
            assert sum(each.num_model_requests for each in own) == 2
            told = [answer.usage for answer in answers[name]]
            assert sum(each.input_tokens for each in own) == sum(each.prompt_tokens for each in told)
            assert sum(each.output_tokens for each in own) == sum(each.completion_tokens for each in told) == 7
    whole = usage.completions(start_time=start, project_ids=["acme"])
    (sums,) = [result for bucket in whole.data for result in bucket.results]
    assert (sums.num_model_requests, sums.project_id, sums.model) == (4, None, None)
    empty = usage.with_raw_response.embeddings(start_time=start)
    page_of_none = UsageEmbeddingsResponse.model_validate_json(empty.text, strict=True)
    assert [bucket.results for bucket in page_of_none.data] == [[]] * len(page_of_none.data)


def test_pages_follow_each_other(keyed: Keyed) -> None:
    usage = keyed.client("admin").admin.organization.usage
    end = int(time.time()) // DAY * DAY
    asked: dict[str, Any] = {"start_time": end - 10 * DAY + 5, "end_time": end, "limit": 4}
    starts, page = [], None
    for _ in range(3):
        found = usage.completions(**asked, **({} if page is None else {"page": page}))
        starts += [bucket.start_time for bucket in found.data]
        page = found.next_page
        assert found.has_more is (page is not None)
    assert starts == [end - number * DAY for number in range(10, 0, -1)]
    assert page is None


def test_only_an_admin_key_may_read_the_usage(keyed: Keyed) -> None:
    with pytest.raises(openai.PermissionDeniedError, match="admin key") as raised:
        keyed.client("web").admin.organization.usage.completions(start_time=0)
    assert raised.value.code == "admin_key_required"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("", "start_time"),
        ("start_time=x", "start_time"),
        ("start_time=-1", "start_time"),
        ("start_time=0&end_time=99999999999999", "end_time"),
        ("start_time=0&bucket_width=1w", "bucket_width"),
        ("start_time=0&bucket_width=1m", "bucket_width"),
        ("start_time=0&limit=32", "limit"),
        ("start_time=0&group_by=colour", "group_by"),
        ("start_time=0&group_by[]=batch", "group_by"),
        ("start_time=0&batch=true", "batch"),
        ("start_time=0&page=next", "page"),
    ],
)
def test_a_wrong_query_is_refused(keyed: Keyed, query: str, param: str) -> None:
    headers = {"Authorization": f"Bearer {keyed.keys['admin']}"}
    answer = httpx2.get(f"{keyed.replica.url}/v1/organization/usage/completions?{query}", headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_budget_is_overrun_by_no_more_than_one_reservation(keyed: Keyed) -> None:
    budget = 1500
    request = GenerateRequest(messages=MESSAGES, sampling_params={"max_tokens": 200, "ignore_eos": True})
    bound = most_tokens(request, MAX_MODEL_LEN) + 100  # the gateway sends some more fields
    used: list[int] = []
    codes: set[str | None] = set()

    def ask(_: int) -> None:
        try:
            used.append(chat(keyed.client("small"), 200).usage.total_tokens)
        except openai.RateLimitError as error:
            codes.add(error.code)

    deadline = time.monotonic() + DEADLINE
    with ThreadPoolExecutor(12) as threads:
        while keyed.spent("small") < budget and time.monotonic() < deadline:
            list(threads.map(ask, range(24)))
            keyed.service.wait_settled()
    assert budget <= sum(used) == keyed.spent("small") < budget + bound
    assert codes == {"insufficient_quota"}
    assert not keyed.service.client.exists(reserved_key("small"))
    with pytest.raises(openai.RateLimitError, match="at 00:00 UTC") as raised:
        chat(keyed.client("small"))
    assert raised.value.type == "insufficient_quota"
    assert raised.value.response.headers["x-should-retry"] == "false"


def test_anthropics_api_has_the_code_too(keyed: Keyed) -> None:
    chat(keyed.client("spent"))
    keyed.service.wait_settled()
    secret = keyed.keys["spent"]
    with (
        anthropic.Anthropic(base_url=keyed.replica.url, api_key=secret, max_retries=0) as client,
        pytest.raises(anthropic.RateLimitError) as raised,
    ):
        client.messages.create(model="tiny", max_tokens=5, messages=MESSAGES)
    error: Any = raised.value.body
    assert error["error"]["code"] == "insufficient_quota"
    assert error["error"]["type"] == "rate_limit_error"


def test_a_request_that_nobody_reads_is_still_settled(keyed: Keyed) -> None:
    options: dict[str, Any] = {
        "model": "tiny",
        "messages": MESSAGES,
        "extra_headers": {"x-headrace-abandon-after": "1"},
    }
    stream = keyed.client("left").chat.completions.create(
        stream=True, max_tokens=1500, extra_body={"ignore_eos": True}, **options
    )
    next(iter(stream))
    assert keyed.service.client.zcard(reserved_key("left")) == 1
    stream.close()
    keyed.service.wait_until(lambda: not keyed.service.client.exists(reserved_key("left")))
    assert keyed.spent("left") > 0


def test_a_refused_request_gives_its_reservation_back(keyed: Keyed) -> None:
    with pytest.raises(openai.BadRequestError):
        keyed.client("left").completions.create(model="tiny", prompt="x" * 900_000)
    keyed.service.wait_until(lambda: not keyed.service.client.exists(reserved_key("left")))


def test_a_retry_with_an_idempotency_key_needs_no_budget(keyed: Keyed) -> None:
    """Also one of an embedding or a completion with several messages."""
    client = keyed.client("retried")
    asked: Any = {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 3, "extra_headers": {"Idempotency-Key": "k"}}
    first = client.completions.create(**asked)
    keyed.service.wait_settled()
    with pytest.raises(openai.RateLimitError):
        chat(client)
    assert client.completions.create(**asked).id == first.id
    assert not keyed.service.client.exists(reserved_key("retried"))


def test_a_line_of_a_batch_over_the_budget_fails_with_the_code(keyed: Keyed) -> None:
    client = keyed.client("batch")
    keyed.service.client.hset(spent_key(keyed.service.client.time()[0] // DAY * DAY), "batch", 5)
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 3}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    keyed.service.wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
    ended = client.batches.retrieve(batch.id)
    assert ended.error_file_id is not None
    error = json.loads(client.files.content(ended.error_file_id).text)
    assert error["response"]["status_code"] == 429
    assert error["response"]["body"]["error"]["code"] == "insufficient_quota"
