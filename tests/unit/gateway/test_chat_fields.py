"""The body of `POST /v1/chat/completions`: how each field is translated, and the error of each invalid one."""

import difflib
import re
from typing import Any

import pytest
from hypothesis import given, settings
from openai.types.chat import completion_create_params

from headrace_gateway.chat.fields import read_chat
from headrace_gateway.requests import field_tables, problems
from headrace_gateway.requests.call import ChatOptions
from unit.gateway.bodies import BODIES, CHAT, JSON, model, outcome
from unit.gateway.chat_bodies import HERMES, NAMED, PAINT, options, read, sampling, wrong


@pytest.mark.parametrize("name", ["CompletionCreateParamsNonStreaming", "CompletionCreateParamsStreaming"])
def test_every_field_of_openai_is_in_a_table(name: str) -> None:
    fields = set(completion_create_params.CompletionCreateParamsBase.__annotations__)
    fields |= set(getattr(completion_create_params, name).__annotations__)
    known = field_tables.CHAT | set(field_tables.SAMPLING) | set(field_tables.IGNORED) | set(field_tables.REFUSED)
    assert fields - known == set()


def test_no_field_is_in_two_tables() -> None:
    served = field_tables.CHAT | field_tables.COMPLETION | set(field_tables.SAMPLING)
    assert not served & set(field_tables.IGNORED)
    assert not served & set(field_tables.REFUSED)
    assert not set(field_tables.IGNORED) & set(field_tables.REFUSED)


@pytest.mark.parametrize("name", field_tables.REFUSED)
def test_unsupported_fields_are_refused_by_name(name: str) -> None:
    error = wrong(**{name: 1})
    assert (error.param, error.code) == (name, "unsupported_parameter")
    assert field_tables.REFUSED[name] in error.message


@pytest.mark.parametrize("name", field_tables.IGNORED)
def test_fields_without_effect_are_accepted(name: str) -> None:
    assert read(**{name: {"any": "value"}}) == read()


@pytest.mark.parametrize("name", sorted(field_tables.CHAT | set(field_tables.SAMPLING) | set(field_tables.REFUSED)))
def test_null_counts_as_absent(name: str) -> None:
    if name not in CHAT:
        assert read(**{name: None}) == read()


SAMPLING_VALUES: dict[str, Any] = {
    "temperature": 3,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "n": 2,
    "seed": -1,
    "stop": ["a", "b"],
    "presence_penalty": -2,
    "frequency_penalty": 2,
    "repetition_penalty": 1.5,
    "logit_bias": {"5": -100},
    "min_tokens": 2,
    "stop_token_ids": [3],
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "prompt_logprobs": 3,
    "allowed_token_ids": [1, 2],
    "bad_words": ["x"],
    "structured_outputs": {"choice": ["a"]},
    "repetition_detection": {"max_pattern_size": 3, "min_count": 4},
    "stream_interval": 3,
    "vllm_xargs": {"a": 1},
}


@pytest.mark.parametrize("name", field_tables.SAMPLING)
def test_each_sampling_parameter_goes_into_the_queue(name: str) -> None:
    assert sampling(**{name: SAMPLING_VALUES[name]})[field_tables.SAMPLING[name]] == SAMPLING_VALUES[name]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        *(({name: {}}, name, "invalid_request") for name in ("temperature", "top_p", "top_k", "min_p", "n", "seed")),
        *(({name: []}, name, "invalid_request") for name in ("presence_penalty", "frequency_penalty", "logit_bias")),
        *(({name: "yes"}, name, "invalid_request") for name in ("ignore_eos", "skip_special_tokens", "min_tokens")),
        ({"n": 65}, "n", "invalid_request"),
        ({"n": 2, "temperature": 0}, "n", "invalid_request"),
        ({"seed": 2**63}, "seed", "invalid_request"),
        ({"seed": 10**5000}, "seed", "invalid_request"),
        ({"stop": ["a"] * 17}, "stop", "invalid_request"),
        ({"vllm_xargs": 5}, "vllm_xargs", "invalid_request"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "invalid_request"),
        ({"stream": "yes"}, "stream", "invalid_request"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_request"),
        ({"stream": True, "stream_options": []}, "stream_options", "invalid_request"),
        (
            {"stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
            "invalid_request",
        ),
        ({"max_tokens": 0}, "max_tokens", "invalid_request"),
        ({"max_tokens": True}, "max_tokens", "invalid_request"),
        ({"max_tokens": 10**5000}, "max_tokens", "invalid_request"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens", "invalid_request"),
        ({"max_completion_tokens": 1, "max_tokens": 2}, "max_tokens", "invalid_request"),
        ({"logprobs": 3}, "logprobs", "invalid_request"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_request"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_request"),
        ({"priority": 10}, "priority", "invalid_request"),
        ({"service_tier": "best"}, "service_tier", "invalid_request"),
        ({"response_format": "json"}, "response_format.type", "invalid_request"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_request"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "invalid_request"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format",
            "invalid_request",
        ),
        ({"store": "no"}, "store", "invalid_request"),
        ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
        ({"verbosity": "much"}, "verbosity", "invalid_request"),
        ({"metadata": {"a": 1}}, "metadata", "invalid_request"),
        ({"metadata": {"a": "x" * 513}}, "metadata", "invalid_request"),
        ({"metadata": {"a" * 65: "x"}}, "metadata", "invalid_request"),
        ({"metadata": {str(each): "x" for each in range(17)}}, "metadata", "invalid_request"),
        ({"metadata": []}, "metadata", "invalid_request"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "invalid_request"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize", "invalid_request"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools", "invalid_request"),
        ({"add_generation_prompt": 1}, "add_generation_prompt", "invalid_request"),
        ({"continue_final_message": True}, "add_generation_prompt", "invalid_request"),
        ({"reasoning_effort": "much"}, "reasoning_effort", "invalid_request"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "invalid_request"),
        ({"include_reasoning": 1}, "include_reasoning", "invalid_request"),
        ({"return_token_ids": 1}, "return_token_ids", "invalid_request"),
        ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids", "invalid_request"),
        ({"max_token": 1}, "max_token", "unsupported_parameter"),
        ({"maxTokens": 1}, "maxTokens", "unsupported_parameter"),
        ({"temprature": 1}, "temprature", "unsupported_parameter"),
    ],
)
def test_an_invalid_value_is_reported_with_its_field(fields: dict[str, Any], param: str, code: str) -> None:
    error = wrong(**fields)
    assert (error.param, error.code) == (param, code)


@pytest.mark.parametrize(
    ("messages", "param", "code"),
    [
        (None, "messages", "invalid_request"),
        ([], "messages", "invalid_request"),
        ("hello", "messages", "invalid_request"),
        (["hello"], "messages[0]", "invalid_request"),
        ([{"content": "x"}], "messages[0].role", "invalid_request"),
        ([{"role": "function", "name": "f", "content": "x"}], "messages[0].role", "invalid_request"),
        ([{"role": "user"}], "messages[0].content", "invalid_request"),
        ([{"role": "user", "content": None}], "messages[0].content", "invalid_request"),
        ([{"role": "user", "content": 5}], "messages[0].content", "invalid_request"),
        ([{"role": "assistant"}], "messages[0].content", "invalid_request"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls", "invalid_request"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id", "invalid_request"),
        (
            [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{}]}],
            "messages[1].tool_calls[0].function",
            None,
        ),
        ([{"role": "user", "content": "x", "name": "\n"}], "messages[0].name", "invalid_request"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}],
            "messages[0].content[1].type",
            "unsupported",
        ),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0].type", "unsupported"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "invalid_request"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0].type", "unsupported"),
    ],
)
def test_an_invalid_message_is_reported_with_its_index(messages: Any, param: str, code: str | None) -> None:
    error = wrong(messages=messages)
    assert (error.param, error.code) == (param, code or "invalid_request")


def test_messages_reach_the_template_as_it_knows_them() -> None:
    calls = [{"id": "call_1", "type": "function", "function": {"name": "paint", "arguments": "{}"}}]
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]},
        {"role": "assistant", "content": None, "tool_calls": calls, "refusal": None, "annotations": [], "audio": None},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "reasoning_content": "hm"},
        {"role": "assistant", "content": None, "refusal": "never"},
    ]
    sent = read(messages=messages).requests[0].messages
    assert sent == [
        {"role": "system", "content": "be\nbrief"},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
        {"role": "assistant", "content": "no", "reasoning_content": "hm"},
        {"role": "assistant", "content": "never"},
    ]
    (first, *_) = read(model(developer=True), messages=messages).requests[0].messages or ()
    assert first["role"] == "developer"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"chat_id": "7", "num_ctx": 2048, "options": {}, "keep_alive": -1}, "chat_id num_ctx options keep_alive"),
        ({"x" * 1000: 1}, "x" * 64),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"response_format": {"type": "text", "x": 1}}, "response_format.x"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
            "response_format.json_schema.x",
        ),
        ({"store": True}, "store"),
        ({"verbosity": "low"}, "verbosity"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"tools": [{"type": "web_search"}, PAINT]}, "tools[web_search]"),
        ({"tools": [{**PAINT, "strict": True}]}, "tools[].strict"),
        ({"tools": [{"type": "function", "function": {"name": "x", "colour": 1}}]}, "tools[].function.colour"),
        (
            {
                "messages": [
                    {"role": "user", "content": "x", "timestamp": 7},
                    {"role": "assistant", "content": "y", "thinking_blocks": [], "id": "a"},
                    {"role": "user", "content": "z", "timestamp": 8},
                ]
            },
            "messages[].timestamp messages[].thinking_blocks messages[].id",
        ),
    ],
)
def test_what_has_no_effect_is_ignored_and_named(fields: dict[str, Any], named: str) -> None:
    call = read(HERMES, **fields)
    assert list(call.ignored) == named.split()
    assert all(call.ignored.values())
    assert not {"colour", "timestamp", "web_search"} & set(re.findall(r"\w+", repr(call.requests[0].to_kwargs())))


def test_unknown_fields_of_a_call_are_not_shown_to_the_model() -> None:
    function = {"name": "paint", "arguments": "{}"}
    call = {"id": "call_1", "type": "function", "function": function}
    turn = {"role": "assistant", "tool_calls": [{**call, "extra_content": {"google": {"thought_signature": "x"}}}]}
    made = read(messages=[*CHAT["messages"], turn, {"role": "tool", "tool_call_id": "call_1", "content": "done"}])
    assert (made.requests[0].messages or ())[1] == {"role": "assistant", "tool_calls": [call]}
    assert list(made.ignored) == ["messages[].tool_calls[].extra_content"]


def test_refused_fields_that_ask_for_nothing_are_accepted() -> None:
    assert read(functions=[], use_beam_search=False, chat_template="") == read()


def test_what_openai_takes_as_absent_or_as_the_least_is_taken() -> None:
    assert sampling(stop="")["stop"] == sampling(stop=[""])["stop"] == []
    assert sampling(stop=["", "a"])["stop"] == ["a"]
    assert 0 < sampling(top_p=0)["top_p"] < 1e-6
    assert read(prompt_cache_key="") == read()


NESTED = {
    "stream": True,
    "stream_options": {"include_usage": None},
    "response_format": {"type": "text", "json_schema": None},
    "tools": [{**PAINT, "function": {**PAINT["function"], "description": None, "strict": None}, "cache": None}],
    "tool_choice": {**NAMED, "allowed_tools": None},
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": None}], "name": None},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c", "index": None, "type": "function", "function": {"name": "f", "arguments": '{"x": null}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "done", "name": None},
    ],
}


def present(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: present(each) for name, each in value.items() if each is not None}
    return [present(each) for each in value] if isinstance(value, list) else value


def test_null_counts_as_absent_at_every_depth() -> None:
    chat = {**NESTED, "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": None}}}
    for fields in (NESTED, {**chat, "tools": None, "tool_choice": None}):
        assert read(HERMES, **fields) == read(HERMES, **present(fields))
        assert read(HERMES, **fields).ignored == {}


def test_nulls_of_a_schema_are_kept() -> None:
    schema = {"type": "object", "properties": {"x": {"enum": ["a", None], "default": None}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert (read(HERMES, tools=[tool]).requests[0].tools or ())[0]["function"]["parameters"] == schema
    options = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    assert sampling(response_format=options)["structured_outputs"]["json"] == schema
    assert sampling(structured_outputs={"json": schema})["structured_outputs"]["json"] == schema


def test_one_error_lists_all_problems() -> None:
    error = wrong(max_token=1, temperature=-1, n="two", messages=[{"role": "clown"}], max_tokens=0, metadata=5)
    for told in ("max_token", "temperature", "n must", "messages[0].role", "max_tokens", "metadata"):
        assert told in error.message


def test_a_problem_is_reported_once() -> None:
    error = wrong(messages=[{"role": "user"}], max_tokens=0, tools=5)
    assert error.message.count(";") == 2


def test_the_number_of_reported_problems_is_limited() -> None:
    error = wrong(messages=[0] * 1_000_000)
    assert error.message.endswith("; and more")
    assert len(error.message) < 2000
    assert len(wrong(**{f"unknown{each}": 1 for each in range(100_000)}).message) < 2000


def test_errors_never_quote_the_request() -> None:
    secret = "the secret words"
    for fields in (
        {"messages": secret},
        {"messages": [{"role": "user", "content": {secret: 1}}]},
        {"temperature": secret},
        {"max_tokens": secret},
        {"stop": [secret * 99]},
        {"tools": [{"type": "function", "function": {"name": secret}}]},
        {"metadata": {"a": [secret]}},
    ):
        assert "secret" not in wrong(**fields).message


def test_no_value_of_max_tokens_means_the_rest_of_the_context() -> None:
    assert sampling()["max_tokens"] == 100
    assert read_chat(CHAT, model=None, lora=None).requests[0].sampling_params == {"max_tokens": 2**31 - 1}
    assert sampling(max_tokens=5)["max_tokens"] == sampling(max_completion_tokens=5)["max_tokens"] == 5
    assert sampling(max_tokens=5, max_completion_tokens=5)["max_tokens"] == 5


def test_an_error_of_min_tokens_uses_the_name_that_the_caller_used() -> None:
    assert wrong(min_tokens=3, max_completion_tokens=2).param == "min_tokens"


def test_logprobs_are_alternatives_of_each_position() -> None:
    assert "logprobs" not in sampling()
    assert "logprobs" not in sampling(logprobs=False)
    assert sampling(logprobs=True)["logprobs"] == 0
    assert sampling(logprobs=True, top_logprobs=7)["logprobs"] == options(logprobs=True, top_logprobs=7).logprobs == 7


def test_usage_in_every_chunk_needs_usage() -> None:
    asked = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    made = options(stream=True, stream_options=asked)
    assert (made.include_usage, made.continuous_usage) == (True, True)
    made = options(stream=True, stream_options={"continuous_usage_stats": True})
    assert (made.include_usage, made.continuous_usage) == (False, False)
    assert read(stream=True).stream


def test_a_response_format_is_a_structured_output() -> None:
    schema = {"type": "object"}
    described = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": False}}
    assert sampling(response_format=described)["structured_outputs"]["json"] == schema
    assert sampling(response_format={"type": "json_object"})["structured_outputs"]["json_object"] is True
    assert "structured_outputs" not in sampling(response_format={"type": "text"})


def test_an_invalid_schema_is_reported_as_the_response_format() -> None:
    deep: dict[str, Any] = {}
    for _ in range(1500):
        deep = {"not": deep}
    large = {"enum": ["x" * 70_000]}
    for schema in (deep, large):
        described = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        assert wrong(response_format=described).param == "response_format"


@pytest.mark.parametrize(
    ("fields", "priority", "tier"),
    [
        ({}, None, None),
        ({"priority": 3}, 3, None),
        ({"service_tier": "auto"}, None, "default"),
        ({"service_tier": "default"}, None, "default"),
        ({"service_tier": "scale"}, None, "default"),
        ({"service_tier": "flex"}, 7, "flex"),
        ({"service_tier": "flex", "priority": 9}, 9, "flex"),
        ({"service_tier": "priority"}, None, "priority"),
        ({"service_tier": "fast"}, None, "priority"),
    ],
)
def test_the_service_tier_is_a_priority(fields: dict[str, Any], priority: int | None, tier: str | None) -> None:
    call = read(**fields)
    assert isinstance(call.options, ChatOptions)
    assert (call.priority, call.options.service_tier) == (priority, tier)


def test_a_message_can_be_continued() -> None:
    request = read(continue_final_message=True, add_generation_prompt=False).requests[0]
    assert (request.continue_final_message, request.add_generation_prompt) == (True, False)


def test_metadata_and_the_adapter_are_kept() -> None:
    call = read_chat({**CHAT, "metadata": {"a": "b"}}, model=model(), lora="french")
    assert isinstance(call.options, ChatOptions)
    assert call.options.metadata == {"a": "b"}
    assert call.requests[0].lora == "french"


@settings(max_examples=100, deadline=None)
@given(body=BODIES, valid=BODIES.map(lambda body: {**body, **CHAT}), messages=JSON, tools=JSON)
def test_any_body_is_read_or_refused(body: Any, valid: Any, messages: Any, tools: Any) -> None:
    thinker = model(tool_parser="hermes", reasoning_parser="think", thinking="enable_thinking")
    for each in (body, valid, {**CHAT, "messages": [messages]}, {**CHAT, "tools": [PAINT, tools]}):
        for registered in (None, thinker):
            error = outcome(read_chat, {"model": "m", **each}, model=registered, lora=None)
            assert error is None or (error.status == 400 and error.message)


def test_unknown_fields_that_differ_in_an_index_cost_one_search_for_a_similar_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched = []

    def get_close_matches(name: str, *args: Any, **named: Any) -> list[str]:
        searched.append(name)
        return difflib.get_close_matches(name, *args, **named)

    monkeypatch.setattr(problems, "get_close_matches", get_close_matches)
    call = read(**{f"[{number}]": 1 for number in range(100)})
    assert list(call.ignored) == ["[]"]
    assert len(searched) == 1
