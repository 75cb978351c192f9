"""Anthropic's Python SDK on a real gateway: what it returns, what it streams, what it raises."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from pydantic import TypeAdapter

from service.gateway.conftest import RunningGateway

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
PAINT: Any = {
    "name": "paint",
    "description": "Paints.",
    "input_schema": {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}},
        "required": ["colour"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as client:
        yield client


def options_of(options: dict[str, Any]) -> dict[str, Any]:
    """Create a message with the arguments of every call here; the SDK has no arguments for the sampling parameters."""
    body = {name: options[name] for name in ("temperature", "top_k") if name in options}
    rest = {name: value for name, value in options.items() if name not in body}
    return {"messages": MESSAGES, "max_tokens": 6, "extra_body": {"temperature": 0, **body}, **rest}


def create(client: anthropic.Anthropic, gateway: RunningGateway, **options: Any) -> Message:
    """Return the answer after strict validation of its body against the SDK's type."""
    options = options_of(options)
    response = client.messages.with_raw_response.create(model=gateway.model, **options)
    assert response.headers["request-id"].startswith("req_")
    return Message.model_validate_json(response.text(), strict=True)


def events_of(client: anthropic.Anthropic, gateway: RunningGateway, **options: Any) -> list[Any]:
    """Return the events of the stream after strict validation against the SDK's types; their names are their types."""
    options = options_of(options)
    response = client.messages.with_raw_response.create(model=gateway.model, stream=True, **options)
    blocks = "\n".join(response.http_response.iter_lines()).split("\n\n")
    events = []
    for block in filter(str.strip, blocks):
        name, data = block.strip("\n").split("\n")
        events.append(EVENT.validate_json(data.removeprefix("data: "), strict=True))
        assert name == f"event: {events[-1].type}"
    return events


def test_a_message_answers_with_text_usage_and_why_it_ended(
    client: anthropic.Anthropic, gateway: RunningGateway
) -> None:
    answer = create(client, gateway, system=[{"type": "text", "text": "Be brief."}])
    assert answer.id.startswith("msg_")
    assert answer.model == gateway.model
    assert (answer.role, answer.stop_reason, answer.stop_sequence) == ("assistant", "max_tokens", None)
    (block,) = answer.content
    assert block.type == "text"
    assert block.text
    assert answer.usage.output_tokens == 6
    assert answer.usage.input_tokens > 0


def test_the_events_of_a_stream_come_in_anthropics_order(client: anthropic.Anthropic, gateway: RunningGateway) -> None:
    events = events_of(client, gateway)
    assert [events[0].type, events[1].type] == ["message_start", "content_block_start"]
    assert {event.type for event in events[2:-3]} == {"content_block_delta"}
    assert [event.type for event in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[0].message.usage.input_tokens > 0
    assert "".join(event.delta.text for event in events[2:-3]) == create(client, gateway).content[0].text  # type: ignore[union-attr]


def test_the_stream_helper_accumulates_the_non_streaming_answer(
    client: anthropic.Anthropic, gateway: RunningGateway
) -> None:
    with client.messages.stream(
        model=gateway.model, messages=MESSAGES, max_tokens=8, extra_body={"top_k": 1}
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    plain = create(client, gateway, max_tokens=8, top_k=1, temperature=1)
    assert final.content[0].text == text == plain.content[0].text  # type: ignore[union-attr]
    assert (final.stop_reason, final.usage.output_tokens) == (plain.stop_reason, plain.usage.output_tokens)
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) == plain.usage.input_tokens + (
        plain.usage.cache_read_input_tokens or 0
    )


def test_cached_tokens_are_reported_separately(client: anthropic.Anthropic, gateway: RunningGateway) -> None:
    messages: list[Any] = [{"role": "user", "content": "the wheel " * 60}]
    create(client, gateway, messages=messages)
    again = create(client, gateway, messages=messages)
    counted = client.messages.count_tokens(model=gateway.model, messages=messages).input_tokens
    assert again.usage.cache_read_input_tokens
    assert again.usage.input_tokens + again.usage.cache_read_input_tokens == counted


def test_a_stop_sequence_is_reported_and_left_out_of_the_text(
    client: anthropic.Anthropic, gateway: RunningGateway
) -> None:
    text = create(client, gateway, max_tokens=20).content[0].text  # type: ignore[union-attr]
    stop = text[3:6]
    answer = create(client, gateway, max_tokens=20, stop_sequences=["never seen", stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in answer.content) == text[: text.index(stop)]  # type: ignore[union-attr]


def test_an_answer_continues_the_assistants_last_message(client: anthropic.Anthropic, gateway: RunningGateway) -> None:
    begun: list[Any] = [*MESSAGES, {"role": "assistant", "content": "hello the"}]
    chat = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
    body = {"model": gateway.model, "max_tokens": 6, "temperature": 0, **chat}
    expected = httpx2.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60).json()
    answer = create(client, gateway, messages=begun)
    assert answer.content[0].text == expected["choices"][0]["message"]["content"]  # type: ignore[union-attr]


def test_a_tool_is_called_and_its_result_goes_back(client: anthropic.Anthropic, gateway: RunningGateway) -> None:
    options: Any = {"tools": [PAINT], "tool_choice": {"type": "tool", "name": "paint"}, "max_tokens": 100}
    answer = create(client, gateway, **options)
    (call,) = answer.content
    assert call.type == "tool_use"
    assert (answer.stop_reason, call.name) == ("tool_use", "paint")
    assert call.id.startswith("toolu_")
    assert call.input["colour"] in ("red", "green")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "done"}]}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": [block.to_dict() for block in answer.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "and now?"}]},
    ]
    again = create(client, gateway, messages=messages)
    assert again.stop_reason == "max_tokens"


def test_a_forced_tool_streams_the_same_call(client: anthropic.Anthropic, gateway: RunningGateway) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    options: Any = {"tools": [PAINT], "tool_choice": choice, "max_tokens": 100}
    plain = create(client, gateway, **options)
    with client.messages.stream(model=gateway.model, **options_of(options)) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == plain.stop_reason == "tool_use"
    assert (final.content[0].name, final.content[0].input) == (plain.content[0].name, plain.content[0].input)  # type: ignore[union-attr]


def test_the_output_follows_a_schema(client: anthropic.Anthropic, gateway: RunningGateway) -> None:
    config: Any = {"format": {"type": "json_schema", "schema": PAINT["input_schema"]}, "effort": "low"}
    answer = create(client, gateway, output_config=config, max_tokens=60)
    assert json.loads(answer.content[0].text)["colour"] in ("red", "green")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"system": "Be brief."},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "hello the"}]},
        {"messages": [*MESSAGES, {"role": "user", "content": [{"type": "text", "text": "and"}]}]},
        {"thinking": {"type": "adaptive"}},
    ],
)
def test_a_count_equals_the_input_tokens_of_the_message(
    client: anthropic.Anthropic, gateway: RunningGateway, extra: dict[str, Any]
) -> None:
    response = client.messages.with_raw_response.count_tokens(**{"model": gateway.model, "messages": MESSAGES, **extra})
    counted = MessageTokensCount.model_validate_json(response.text(), strict=True)
    usage = create(client, gateway, **extra).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_request_of_claude_code_is_accepted(client: anthropic.Anthropic, gateway: RunningGateway) -> None:
    mark: Any = {"cache_control": {"type": "ephemeral"}}
    answer = client.beta.messages.create(
        model=gateway.model,
        max_tokens=6,
        betas=["interleaved-thinking-2025-05-14", "context-management-2025-06-27"],
        metadata={"user_id": "u"},
        system=[{"type": "text", "text": "You are brief.", **mark}, {"type": "text", "text": "Very.", **mark}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "hello", **mark}]}],
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        extra_body={"output_config": {"effort": "high"}, "temperature": 1},
    )
    assert answer.content


@pytest.mark.parametrize(
    ("options", "error", "kind", "named"),
    [
        ({"model": "nobody"}, anthropic.NotFoundError, "not_found_error", "nobody"),
        ({"extra_body": {"temperature": 2}}, anthropic.BadRequestError, "invalid_request_error", "temperature"),
        ({"extra_body": {"max_token": 1}}, anthropic.BadRequestError, "invalid_request_error", "max_token"),
        ({"messages": []}, anthropic.BadRequestError, "invalid_request_error", "messages"),
        (
            {"messages": [{"role": "user", "content": "x " * 9000}]},
            anthropic.BadRequestError,
            "invalid_request_error",
            "context length",
        ),
    ],
)
def test_each_error_raises_the_sdks_own_exception(
    client: anthropic.Anthropic,
    gateway: RunningGateway,
    options: dict[str, Any],
    error: type[anthropic.APIStatusError],
    kind: str,
    named: str,
) -> None:
    for streamed in (False, True):
        with pytest.raises(error) as raised:
            client.messages.create(
                **{"model": gateway.model, "messages": MESSAGES, "max_tokens": 4, "stream": streamed, **options}
            )
        body: Any = raised.value.body
        assert (body["type"], body["error"]["type"]) == ("error", kind)
        assert named in body["error"]["message"]
        assert body["request_id"] == raised.value.request_id


def test_a_broken_stream_is_rejoined_at_another_replica(gateway: RunningGateway) -> None:
    body = {"model": gateway.model, "max_tokens": 12, "messages": MESSAGES, "temperature": 0, "stream": True}
    first, second = (httpx2.Client(base_url=replica.url, timeout=60) for replica in gateway.replicas)
    with first, second:
        whole = first.post("/v1/messages", json=body, headers={"X-Headrace-Resume": "1"})
        blocks = [block for block in whole.text.split("\n\n") if block]
        answer = whole.headers["x-headrace-id"]
        for place in (0, 3, len(blocks) - 1):
            cursor = blocks[place].split("\n")[0].removeprefix("id: ")
            rest = second.get(f"/v1/messages/{answer}", headers={"Last-Event-ID": cursor}, params={"stream": "true"})
            assert [block for block in rest.text.split("\n\n") if block] == blocks[place + 1 :]
        again = second.get(f"/v1/messages/{answer}").json()
        assert Message.model_validate(again, strict=True).id == answer
        missing = second.get("/v1/messages/msg_" + "0" * 32)
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
