"""`client.decisions` of openai-python on a real gateway, and lines of batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from openai.types import Decision

from service.gateway.conftest import RunningGateway
from service.gateway.test_batches import has_ended, until

TEXT = "the river turns the mill"
QUESTIONS: list[Any] = [
    {"type": "predicate", "instructions": "The mill is old.", "name": "old"},
    {"type": "choice", "instructions": "Where?", "choices": [{"value": True, "description": "here"}, {"value": "no"}]},
    {"type": "score", "instructions": "How old?", "levels": [{"label": "new"}, {"label": "old"}]},
]


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_sdk_reads_every_kind_of_answer(client: openai.OpenAI, gateway: RunningGateway) -> None:
    response = client.decisions.with_raw_response.create(model=gateway.model, input=TEXT, questions=QUESTIONS)
    decision = Decision.model_validate_json(response.text, strict=True)
    predicate, choice, score = decision.answers
    assert (predicate.type, predicate.name) == ("predicate", "old")
    assert 0 < predicate.probability < 1
    assert choice.type == "choice" and {type(each.value) for each in choice.probabilities} == {bool, str}
    assert score.type == "score" and 0 < score.score < 1
    assert decision.usage.total_tokens == decision.usage.input_tokens + decision.usage.output_tokens


async def test_the_async_sdk_sends_messages_and_calls(gateway: RunningGateway) -> None:
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": TEXT}, {"type": "input_json", "data": {"a": 1}}]},
        {"type": "custom_tool_call", "call_id": "c", "name": "look", "input": "mill"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "old"},
    ]
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        decision = await client.decisions.create(
            model=gateway.model,
            input=items,
            questions=QUESTIONS * 40,
            prompt_cache_key="k",
            prompt_cache_options={"mode": "implicit"},
            safety_identifier="u",
        )
    assert len(decision.answers) == 120
    assert decision.answers[0] == decision.answers[3]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"questions": []}, "questions"),
        ({"questions": [*QUESTIONS, {"type": "score", "instructions": "x"}]}, "questions[3].levels"),
        ({"input": TEXT * 900}, "input"),
        ({"model": "absent"}, "model"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, None),
    ],
)
def test_the_sdk_raises_what_is_wrong(
    client: openai.OpenAI, gateway: RunningGateway, given: dict[str, Any], param: str | None
) -> None:
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as caught:
        client.decisions.create(**{"model": gateway.model, "input": TEXT, "questions": QUESTIONS, **given})
    assert param is None or caught.value.param == param


def test_a_batch_answers_decisions(client: openai.OpenAI, gateway: RunningGateway) -> None:
    body = {"model": gateway.model, "input": TEXT, "questions": QUESTIONS}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/decisions", "body": body}
    uploaded = client.files.create(file=("lines.jsonl", json.dumps(line).encode()), purpose="batch")
    made = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/decisions", completion_window="24h")  # type: ignore[arg-type]
    batch = until(client, made.id, has_ended)
    assert batch.output_file_id is not None, batch
    (answer,) = map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
    direct = httpx2.post(f"{gateway.url}/v1/decisions", json=body, timeout=60).json()
    assert answer["response"]["body"]["answers"] == direct["answers"]
