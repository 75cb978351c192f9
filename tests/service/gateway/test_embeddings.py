"""`POST /v1/embeddings` through a gateway, Redis and a worker of an embedding model, with OpenAI's SDK."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import httpx2
import numpy as np
import openai
import pytest

from engine.pooling.tiny_pooling_models import NORMALIZE, add_modules, build, pooling
from headrace_broker import BrokerSettings, Client
from service.gateway.conftest import RunningGateway
from service.gateway.gateway_process import GatewayProcess
from service.servers import make_server
from service.workers.service import DEADLINE, Service

TEXTS = ["the mill", "a wheel in the water", "river"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    folder = tmp_path_factory.mktemp("embedder")
    build(folder / "bert", "bert")
    add_modules(folder / "bert", [pooling(), NORMALIZE])
    with make_server() as server:
        service = Service(server, str(folder / "bert"), folder)
        replica = GatewayProcess(redis_url=server.url, log=folder / "gateway.log", files=folder / "files")
        try:
            service.start_worker(dtype="float32").wait_ready()
            yield RunningGateway(service, (replica.wait_ready(), replica))
        finally:
            replica.close()
            service.close()


@pytest.fixture
def sdk(embedder: RunningGateway) -> Iterator[openai.OpenAI]:
    url = f"{embedder.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=DEADLINE) as client:
        yield client


def rows_of(embedder: RunningGateway) -> np.ndarray:
    with Client(BrokerSettings(redis_url=embedder.service.url), model="tiny") as client:
        return np.array(client.embed(TEXTS, timeout=DEADLINE).rows)


def test_the_sdk_reads_the_rows_of_the_queue_in_both_formats(embedder: RunningGateway, sdk: openai.OpenAI) -> None:
    expected = rows_of(embedder)
    silent = sdk.embeddings.create(model="tiny", input=TEXTS)  # the SDK asks for base64
    floats = sdk.embeddings.create(model="tiny", input=TEXTS, encoding_format="float", user="someone")
    for answer in (silent, floats):
        assert [each.index for each in answer.data] == [0, 1, 2]
        assert np.array_equal(np.array([each.embedding for each in answer.data], "<f4"), expected)
        assert answer.model == "tiny"
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(TEXTS)
    raw = sdk.embeddings.create(model="tiny", input=TEXTS, encoding_format="base64")
    assert base64.b64decode(raw.data[1].embedding) == expected[1].tobytes()  # type: ignore[arg-type]


def test_token_ids_are_the_whole_input(sdk: openai.OpenAI) -> None:
    one = sdk.embeddings.create(model="tiny", input=[5, 6, 7])
    two = sdk.embeddings.create(model="tiny", input=[[5, 6, 7], [8]])
    assert one.usage.prompt_tokens == 3
    assert two.usage.prompt_tokens == 4
    assert one.data[0].embedding == pytest.approx(two.data[0].embedding, abs=1e-6)


def test_many_inputs_become_several_messages_with_one_answer(sdk: openai.OpenAI) -> None:
    answer = sdk.embeddings.create(model="tiny", input=TEXTS * 100)
    assert [each.index for each in answer.data] == list(range(300))
    assert answer.data[299].embedding == pytest.approx(answer.data[2].embedding, abs=1e-6)


def test_a_late_error_counts_the_inputs_of_the_call(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.embeddings.create(model="tiny", input=[[5]] * 299 + [[10**9]])
    assert caught.value.param == "input[299]"
    assert "input[299] must hold token ids" in caught.value.message


def test_the_wrong_task_is_refused_by_name(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="computes embeddings; it does not generate: use /v1/embeddings"):
        sdk.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])


def test_the_model_list_says_what_the_model_serves(embedder: RunningGateway, sdk: openai.OpenAI) -> None:
    (model,) = httpx2.get(f"{embedder.url}/v1/models").json()["data"]
    assert model["tasks"] == ["embed"]
    assert (
        model["dimensions"]
        == rows_of(embedder).shape[1]
        == len(sdk.embeddings.create(model="tiny", input="a").data[0].embedding)
    )


def test_a_cut_input_is_named_in_a_header(embedder: RunningGateway) -> None:
    body = {"model": "tiny", "input": ["mill", "mill " * 50], "truncate_prompt_tokens": 4}
    answer = httpx2.post(f"{embedder.url}/embeddings", json=body, timeout=DEADLINE)
    assert answer.headers["x-headrace-truncated"] == "1"
