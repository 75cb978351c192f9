"""openai-python's Responses API on a real gateway: what it returns, streams, continues, and what survives a kill -9."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from headrace_broker.keys import result_key, stream_key
from service.gateway.conftest import RunningGateway
from service.gateway.gateway_process import PATIENCE
from service.gateway.test_openai_python import COLOURS

EVENT: Any = pydantic.TypeAdapter(ResponseStreamEvent)
PAINT: Any = {"type": "function", "name": "paint", "description": "Paints.", "parameters": COLOURS, "strict": False}
LONG: Any = {"max_output_tokens": 300, "temperature": 1, "extra_body": {"ignore_eos": True, "seed": 3}}
LONGER: Any = {**LONG, "max_output_tokens": 800}
"""No worker ends it before it is killed, or told to cancel it."""


ClientOf = Callable[[str], openai.OpenAI]


@pytest.fixture
def client_of() -> Iterator[ClientOf]:
    """It makes clients that are closed after the test, with the streams that nobody read to their end."""
    with ExitStack() as clients:
        yield lambda url: clients.enter_context(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))


@pytest.fixture
def client(gateway: RunningGateway, client_of: ClientOf) -> openai.OpenAI:
    return client_of(gateway.url)


def create(client: openai.OpenAI, **options: Any) -> Response:
    """Return the object after strict validation of its body against the SDK's type."""
    options = {"model": "tiny", "input": "hello", "max_output_tokens": 16, "temperature": 0, **options}
    response = client.responses.with_raw_response.create(**options)
    return Response.model_validate_json(response.text, strict=True)


def events_of(raw: Any) -> list[Any]:
    """The events of a stream, each of which has the SDK's type."""
    lines = [line for line in raw.http_response.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    events = []
    for name, data in zip(lines[::2], lines[1::2], strict=True):
        event = EVENT.validate_json(data.removeprefix("data: "), strict=True)
        assert name == f"event: {event.type}"
        events.append(event)
    return events


def stream(client: openai.OpenAI, **options: Any) -> list[Any]:
    options = {"model": "tiny", "input": "hello", "max_output_tokens": 16, "temperature": 0, **options}
    return events_of(client.responses.with_raw_response.create(stream=True, **options))


def replayed(client: openai.OpenAI, response_id: str, **options: Any) -> list[Any]:
    return events_of(client.responses.with_raw_response.retrieve(response_id, stream=True, **options))


def wait_until(client: openai.OpenAI, response_id: str, holds: Callable[[Response], bool]) -> Response:
    deadline = time.monotonic() + PATIENCE
    while not holds(response := client.responses.retrieve(response_id)):
        assert time.monotonic() < deadline, response.status
    return response


def has_ended(response: Response) -> bool:
    return response.status not in ("queued", "in_progress")


def test_a_response_has_text_usage_and_the_requests_fields(client: openai.OpenAI) -> None:
    response = create(client, instructions="be brief", metadata={"a": "b"}, extra_body={"ignore_eos": True})
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text
    assert response.usage is not None
    assert response.usage.output_tokens == 16
    assert (response.instructions, response.metadata) == ("be brief", {"a": "b"})
    assert client.responses.retrieve(response.id).to_dict() == response.to_dict()


def test_the_stream_folds_to_the_response(client: openai.OpenAI) -> None:
    events = stream(client, max_output_tokens=40)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events][:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    last: Any = events[-1]
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    plain = create(client, max_output_tokens=40)
    assert "".join(texts) == last.response.output_text == plain.output_text
    assert last.response.usage == plain.usage
    with client.responses.stream(model="tiny", input="hello", max_output_tokens=40, temperature=0) as helper:
        kinds = [event.type for event in helper]
    assert kinds == [event.type for event in events]


def test_a_parsed_response_has_the_callers_type(client: openai.OpenAI) -> None:
    class Answer(pydantic.BaseModel):
        colour: Literal["red", "green"]

    response = client.responses.parse(model="tiny", input="hello", text_format=Answer, max_output_tokens=60)
    assert response.output_parsed in (Answer(colour="red"), Answer(colour="green"))


def test_a_forced_tool_is_called_and_its_result_continues_the_response(client: openai.OpenAI) -> None:
    options: Any = {"tools": [PAINT], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 100}
    response = create(client, **options)
    (call,) = response.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["colour"] in ("red", "green")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    again = create(client, input=[result], previous_response_id=response.id)
    whole = create(client, input=[{"role": "user", "content": "hello"}, call.to_dict(), result])
    assert again.usage is not None
    assert whole.usage is not None
    assert again.usage.input_tokens == whole.usage.input_tokens
    assert again.output_text == whole.output_text
    (streamed,) = [
        event for event in stream(client, **options) if event.type == "response.function_call_arguments.done"
    ]
    assert streamed.arguments == call.arguments
    page = client.responses.input_items.list(again.id)
    assert [item.type for item in page.data] == ["function_call_output"]


def test_log_probabilities_come_with_the_text(client: openai.OpenAI) -> None:
    options: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = create(client, **options)
    (message,) = response.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs
    assert all(len(token.top_logprobs) == 2 for token in part.logprobs)
    deltas = [event for event in stream(client, **options) if event.type == "response.output_text.delta"]
    assert [token.logprob for event in deltas for token in event.logprobs] == [each.logprob for each in part.logprobs]


def test_a_background_response_is_polled_and_streamed_at_any_replica(
    gateway: RunningGateway, client_of: ClientOf
) -> None:
    first, second = (client_of(replica.url) for replica in gateway.replicas)
    response = create(first, background=True, **LONG)
    assert response.status in ("queued", "in_progress")  # a worker may have begun by then
    done = wait_until(second, response.id, has_ended)
    events = replayed(second, response.id)
    assert [event.type for event in events][:3] == ["response.created", "response.queued", "response.in_progress"]
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == done.output_text
    for cut in (0, 1, 7, len(events) - 1):
        assert replayed(first, response.id, starting_after=cut) == events[cut + 1 :]
    with first.responses.stream(response_id=response.id, starting_after=5) as helper:
        assert [event.sequence_number for event in helper] == list(range(6, len(events)))


@pytest.mark.parametrize(("window", "seconds"), [("2h", 7200), ("8h", 28_800)])
def test_a_response_with_a_completion_window_is_due_then_and_says_when_it_is_expected(
    gateway: RunningGateway, client: openai.OpenAI, window: Any, seconds: int
) -> None:
    response = create(client, background=True, background_options={"completion_window": window})
    assert (response.model_extra or {})["expected_at"] == response.created_at + seconds
    done = wait_until(client, response.id, has_ended)
    assert done.status in ("completed", "incomplete")
    assert (done.model_extra or {})["expected_at"] == response.created_at + seconds


def test_a_response_without_a_completion_window_has_no_expected_time(client: openai.OpenAI) -> None:
    for options in ({}, {"background_options": {"completion_window": "soonest"}}):
        response = create(client, background=True, **options)
        assert "expected_at" not in (response.model_extra or {})


def test_a_completion_window_without_background_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="2h requires background: true") as refused:
        create(client, background_options={"completion_window": "2h"})
    assert refused.value.param == "background_options.completion_window"


def test_a_background_response_survives_kill_9_of_its_gateway_and_its_worker(
    gateway: RunningGateway, client_of: ClientOf
) -> None:
    first, second = gateway.replicas
    undisturbed = events_of(raw_stream(client_of(second.url)))
    raw = raw_stream(client_of(first.url))
    taken = []
    lines = raw.http_response.iter_lines()
    while len(taken) < 20:
        line = next(lines)
        if line.startswith("data: "):
            taken.append(EVENT.validate_json(line.removeprefix("data: "), strict=True))
    first.kill()
    gateway.service.workers[-1].kill()
    try:
        gateway.service.start_worker().wait_ready()
        response_id = taken[0].response.id
        rest = replayed(client_of(second.url), response_id, starting_after=taken[-1].sequence_number)
    finally:
        first.start()
        first.wait_ready()
    events = [*taken, *rest]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events == replayed(client_of(first.url), response_id)
    assert len(gateway.service.stream(response_id).attempts) == 2
    assert events[-1].response.output_text == undisturbed[-1].response.output_text
    assert [event.type for event in events if "delta" not in event.type] == [
        event.type for event in undisturbed if "delta" not in event.type
    ]


def raw_stream(client: openai.OpenAI) -> Any:
    options: Any = {"model": "tiny", "input": "hello", "stream": True, "background": True, **LONGER}
    return client.responses.with_raw_response.create(**options)


def test_a_cancelled_response_stays_cancelled(client: openai.OpenAI, gateway: RunningGateway) -> None:
    raw = raw_stream(client)
    lines = raw.http_response.iter_lines()
    next(lines)
    response_id = json.loads(next(lines).removeprefix("data: "))["response"]["id"]
    assert client.responses.cancel(response_id).status == "cancelled"
    assert client.responses.cancel(response_id).status == "cancelled"
    last: Any = replayed(client, response_id)[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    gateway.service.wait_ended([response_id])
    assert client.responses.retrieve(response_id).status == "cancelled"
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(create(client).id)


def test_a_deleted_response_is_gone(client: openai.OpenAI, gateway: RunningGateway) -> None:
    response = create(client)
    redis, texts = gateway.service.client, (stream_key(response.id), result_key(response.id))
    while redis.exists(*texts) < 2:  # the result is written after the end of the stream
        time.sleep(0.01)
    client.responses.delete(response.id)
    assert redis.exists(*texts) == 0
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            call(response.id)
    with pytest.raises(openai.BadRequestError) as refused:
        create(client, previous_response_id=response.id)
    assert refused.value.code == "previous_response_not_found"
