"""openai-python on a real gateway: what it returns, what it streams, what it raises."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from service.gateway.conftest import RunningGateway

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
COLOURS = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
PAINT: Any = {"type": "function", "function": {"name": "paint", "description": "Paints.", "parameters": COLOURS}}
ASCII_ONLY = {"allowed_token_ids": [7]}
PAINT_CHOICE: Any = {"type": "function", "function": {"name": "paint"}}


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def create(client: openai.OpenAI, gateway: RunningGateway, **options: Any) -> ChatCompletion:
    """Return the answer after strict validation of its body against the SDK's type."""
    options = {"messages": MESSAGES, "max_tokens": 6, "temperature": 0, **options}
    response = client.chat.completions.with_raw_response.create(model=gateway.model, **options)
    return ChatCompletion.model_validate_json(response.text, strict=True)


def stream(client: openai.OpenAI, gateway: RunningGateway, **options: Any) -> list[ChatCompletionChunk]:
    options = {"messages": MESSAGES, "max_tokens": 6, "temperature": 0, **options}
    response = client.chat.completions.with_raw_response.create(model=gateway.model, stream=True, **options)
    lines = [line for line in response.http_response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [ChatCompletionChunk.model_validate_json(line.removeprefix("data: "), strict=True) for line in lines[:-1]]


def test_models_are_listed_and_found(client: openai.OpenAI, gateway: RunningGateway) -> None:
    response = client.models.with_raw_response.list()
    (listed,) = json.loads(response.text)["data"]
    Model.model_validate(listed, strict=True)
    assert client.models.retrieve(gateway.model).id == listed["id"] == gateway.model


def test_a_chat_answers_with_text_and_usage(client: openai.OpenAI, gateway: RunningGateway) -> None:
    answer = create(client, gateway, extra_body={"ignore_eos": True})
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert choice.message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6


def test_every_chunk_of_a_stream_is_a_chunk_of_the_sdk(client: openai.OpenAI, gateway: RunningGateway) -> None:
    options: dict[str, Any] = {"n": 2, "temperature": 1, "seed": 3, "logprobs": True, "top_logprobs": 2}
    answer = create(client, gateway, **options)
    chunks = stream(client, gateway, stream_options={"include_usage": True}, **options)
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    for index, choice in enumerate(answer.choices):
        mine = [part for chunk in chunks for part in chunk.choices if part.index == index]
        assert "".join(part.delta.content or "" for part in mine) == (choice.message.content or "")
        assert [part.finish_reason for part in mine if part.finish_reason] == [choice.finish_reason]
        assert choice.logprobs is not None
        streamed = [each for part in mine if part.logprobs for each in part.logprobs.content or []]
        assert streamed == choice.logprobs.content


def test_the_stream_helper_accumulates_the_non_streaming_answer(client: openai.OpenAI, gateway: RunningGateway) -> None:
    options: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    with client.chat.completions.stream(model=gateway.model, **options) as events:
        kinds = [event.type for event in events]
        final = events.current_completion_snapshot  # get_final_completion raises where max_tokens was reached
    assert kinds.count("content.done") == 1
    assert final.choices[0].message.content == create(client, gateway, **options).choices[0].message.content


def test_a_parsed_answer_has_the_callers_type(client: openai.OpenAI, gateway: RunningGateway) -> None:
    class Answer(pydantic.BaseModel):
        colour: Literal["red", "green"]

    answer = client.chat.completions.parse(
        model=gateway.model, messages=MESSAGES, response_format=Answer, max_tokens=60
    )
    assert answer.choices[0].message.parsed in (Answer(colour="red"), Answer(colour="green"))


def test_a_forced_tool_is_called_and_its_result_goes_back(client: openai.OpenAI, gateway: RunningGateway) -> None:
    answer = create(client, gateway, tools=[PAINT], tool_choice=PAINT_CHOICE, max_tokens=100)
    message = answer.choices[0].message
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert call.function.name == "paint"
    assert json.loads(call.function.arguments)["colour"] in ("red", "green")
    told = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    again = create(client, gateway, messages=[*MESSAGES, message.to_dict(), told])
    assert again.choices[0].message.content is not None


def test_a_forced_tool_streams_the_same_call(client: openai.OpenAI, gateway: RunningGateway) -> None:
    options: Any = {"tools": [PAINT], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100}
    answer = create(client, gateway, **options)
    with client.chat.completions.stream(model=gateway.model, messages=MESSAGES, temperature=0, **options) as events:
        final = events.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls or []
    (plain,) = answer.choices[0].message.tool_calls or []
    assert plain.type == "function"
    assert (streamed.function.name, streamed.function.arguments) == (plain.function.name, plain.function.arguments)
    assert final.choices[0].finish_reason == answer.choices[0].finish_reason == "tool_calls"


def test_a_completion_echoes_its_prompt_with_log_probabilities(client: openai.OpenAI, gateway: RunningGateway) -> None:
    response = client.completions.with_raw_response.create(
        model=gateway.model, prompt="hello world", max_tokens=3, echo=True, logprobs=1, extra_body=ASCII_ONLY
    )
    body = json.loads(response.text)
    shape = body["choices"][0]["logprobs"]
    assert (
        shape["token_logprobs"][0] is shape["top_logprobs"][0] is None
    )  # as in OpenAI's API, for which the SDK has no type
    answer = Completion.model_validate_json(response.text.replace("[null,", "[", 2), strict=True)
    (choice,) = answer.choices
    assert choice.text.startswith("hello world")
    assert choice.logprobs is not None
    assert answer.usage is not None
    assert len(choice.logprobs.tokens or []) == answer.usage.total_tokens
    assert "".join(choice.logprobs.tokens or []) == choice.text


def test_a_completion_of_token_ids_only_scores_them(client: openai.OpenAI, gateway: RunningGateway) -> None:
    """As lm-eval does: at most one extra token is generated, and the prompt's come first."""
    answer = client.completions.create(
        model=gateway.model, prompt=[5, 6, 7], max_tokens=0, temperature=0, echo=True, logprobs=1
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.token_logprobs or []) == 3


def test_several_prompts_become_choices_in_order(client: openai.OpenAI, gateway: RunningGateway) -> None:
    prompts = ["one", "two", "three"]
    options: Any = {"model": gateway.model, "max_tokens": 4, "temperature": 0, "echo": True}
    answer = client.completions.create(prompt=prompts, **options)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        assert choice.text == client.completions.create(prompt=prompt, **options).choices[0].text


@pytest.mark.parametrize(
    ("options", "error", "code", "param"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "model_not_found", "model"),
        ({"temperature": -1}, openai.BadRequestError, "invalid_request", "temperature"),
        ({"extra_body": {"max_token": 1}}, openai.BadRequestError, "unsupported_parameter", "max_token"),
        ({"messages": []}, openai.BadRequestError, "invalid_request", "messages"),
        ({"extra_body": {"max_tokens": "many"}}, openai.BadRequestError, "invalid_request", "max_tokens"),
        (
            {"messages": [{"role": "user", "content": "x " * 9000}]},
            openai.BadRequestError,
            "context_length_exceeded",
            "messages",
        ),
    ],
)
def test_each_error_raises_the_sdks_own_exception(
    client: openai.OpenAI,
    gateway: RunningGateway,
    options: dict[str, Any],
    error: type[openai.APIError],
    code: str,
    param: str,
) -> None:
    for streamed in (False, True):
        with pytest.raises(error) as raised:
            client.chat.completions.create(
                **{"model": gateway.model, "messages": MESSAGES, "stream": streamed, **options}
            )
        assert (raised.value.code, raised.value.param) == (code, param)


async def test_the_asynchronous_client_reads_streams_side_by_side(gateway: RunningGateway) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        streams = [
            await client.chat.completions.create(
                model=gateway.model, messages=MESSAGES, max_tokens=4, stream=True, extra_body={"ignore_eos": True}
            )
            for _ in range(4)
        ]
        for one in streams:
            chunks = [chunk async for chunk in one]
            assert chunks[-1].choices[0].finish_reason == "length"
