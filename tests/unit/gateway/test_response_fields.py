"""The body of `POST /v1/responses`: the error of each invalid field, and the chat messages made from the input."""

from typing import Any

import pytest
from hypothesis import given

from headrace_gateway.requests import field_tables
from headrace_gateway.requests.call import Call, ResponseOptions
from headrace_gateway.responses.fields import read_response
from unit.gateway.bodies import BODIES, RESPONSE, model, outcome, refusal

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
SCHEMA = {"type": "object", "properties": {}}
JSON_SCHEMA = {"type": "json_schema", "name": "s", "schema": SCHEMA}
HUGE = 2**70


def read(**fields: Any) -> Call:
    return read_response({**RESPONSE, **fields}, model=model(), lora=None)


def messages(items: Any, **fields: Any) -> Any:
    return read(input=items, **fields).requests[0].messages


def options(**fields: Any) -> ResponseOptions:
    found = read(**fields).options
    assert isinstance(found, ResponseOptions)
    return found


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": []}, "input", "invalid_request"),
        ({"input": 5}, "input", "invalid_request"),
        ({"input": [5]}, "input[0]", "invalid_request"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", "unsupported"),
        ({"input": [{"role": "critic", "content": "a"}]}, "input[0].role", "invalid_request"),
        ({"input": [{"role": "user"}]}, "input[0].content", "invalid_request"),
        ({"input": [{"role": "user", "content": "a", "id": "x"}] * 2}, "input[1].id", "invalid_request"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
            "unsupported",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input[0].content[0].text",
            "invalid_request",
        ),
        ({"input": [{"role": "user", "content": "a", "status": "new"}]}, "input[0].status", "invalid_request"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id", "invalid_request"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output", "invalid_request"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content", "unsupported"),
        ({"input": [{"type": "reasoning", "summary": ["x"]}]}, "input[0].summary", "invalid_request"),
        ({"instructions": 5}, "instructions", "invalid_request"),
        ({"user": 5}, "user", "invalid_request"),
        ({"safety_identifier": HUGE}, "safety_identifier", "invalid_request"),
        ({"tools": [TOOL | {"parameters": {"const": HUGE}}]}, "tools[0].parameters", "invalid_request"),
        (
            {"tools": [TOOL | {"parameters": {"const": HUGE}}], "tool_choice": "none"},
            "tools[0].parameters",
            "invalid_request",
        ),
        ({"tools": [TOOL | {"strict": HUGE}]}, "tools[0].strict", "invalid_request"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f", "x": HUGE}},
            "tool_choice",
            "invalid_request",
        ),
        ({"text": {"format": JSON_SCHEMA | {"schema": {"const": HUGE}}}}, "text.format.schema", "invalid_request"),
        ({"text": {"format": JSON_SCHEMA | {"strict": HUGE}}}, "text.format.strict", "invalid_request"),
        ({"text": {"format": JSON_SCHEMA | {"name": HUGE}}}, "text.format.name", "invalid_request"),
        ({"text": {"format": JSON_SCHEMA | {"description": 5}}}, "text.format.description", "invalid_request"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_request"),
        ({"max_output_tokens": "many"}, "max_output_tokens", "invalid_request"),
        ({"temperature": -1}, "temperature", "invalid_request"),
        ({"max_tokens": 5}, "max_tokens", "unsupported_parameter"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"conversation": "c"}, "conversation", "unsupported_parameter"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
        ({"truncation": "middle"}, "truncation", "invalid_request"),
        ({"include": ["everything"]}, "include", "invalid_request"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "invalid_request"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary", "invalid_request"),
        ({"text": False}, "text", "invalid_request"),
        ({"text": {"verbosity": "much"}}, "text.verbosity", "invalid_request"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_request"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "invalid_request"),
        (
            {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}, "tools": [TOOL]},
            "text.format",
            "invalid_request",
        ),
        ({"tools": 5}, "tools", "invalid_request"),
        ({"tools": [{"type": "function", "name": "f g"}]}, "tools[0].name", "invalid_request"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name", "invalid_request"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice", "invalid_request"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options", "invalid_request"),
        ({"store": "yes"}, "store", "invalid_request"),
        ({"metadata": {"a": 1}}, "metadata", "invalid_request"),
        ({"previous_response_id": 5}, "previous_response_id", "invalid_request"),
        ({"background_options": "2h"}, "background_options", "invalid_request"),
        (
            {"background": True, "background_options": {"completion_window": "3h"}},
            "background_options.completion_window",
            "invalid_request",
        ),
        (
            {"background": True, "background_options": {"completion_window": ["2h"]}},
            "background_options.completion_window",
            "invalid_request",
        ),
        (
            {"background": True, "background_options": {"continuation_id": 5}},
            "background_options.continuation_id",
            "invalid_request",
        ),
    ],
)
def test_each_problem_names_its_field(fields: dict[str, Any], param: str, code: str) -> None:
    error = refusal(read_response, {**RESPONSE, **fields}, model=model(), lora=None)
    assert (error.param, error.code) == (param, code)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"client_metadata": {}, "colour": 1}, "client_metadata colour"),
        ({"input": [{"role": "user", "content": "a", "colour": 1}]}, "input[].colour"),
        ({"truncation": "auto"}, "truncation"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"reasoning": {"effort": "high", "mode": "pro"}}, "reasoning.mode reasoning.effort"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"tools": [TOOL, {"type": "web_search"}, {"type": "custom", "name": "f"}]}, "tools[web_search] tools[custom]"),
        ({"tools": [{**TOOL, "colour": 1}]}, "tools[].colour"),
    ],
)
def test_what_has_no_effect_is_ignored_and_named(fields: dict[str, Any], named: str) -> None:
    call = read(**fields)
    assert list(call.ignored) == named.split()
    assert "colour" not in repr([each.to_kwargs() for each in call.requests])
    assert {tool["type"] for tool in options(**fields).config["tools"]} <= {"function"}


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tool_calls": 3},
        {"include": ["file_search_call.results", "reasoning.encrypted_content"]},
        {"reasoning": {"effort": None, "summary": None}},
        {"text": {"format": None, "verbosity": None}},
        {"input": [{"type": "message", "role": "user", "id": None, "content": [{"type": "input_text", "text": "a"}]}]},
    ],
)
def test_what_changes_nothing_is_accepted(fields: dict[str, Any]) -> None:
    assert read(**fields).ignored == {}


@given(BODIES)
def test_any_object_is_read_or_refused(body: dict[str, Any]) -> None:
    # the name of the model is checked before
    error = outcome(read_response, {**RESPONSE, **body, "model": RESPONSE["model"]}, model=model(), lora=None)
    assert error is None or (error.status == 400 and error.message)


@pytest.mark.parametrize("name", sorted(field_tables.RESPONSE_REFUSED))
def test_unsupported_fields_are_refused_with_an_alternative(name: str) -> None:
    error = refusal(read_response, {**RESPONSE, name: 1}, model=model(), lora=None)
    assert (error.param, error.code) == (name, "unsupported_parameter")
    assert field_tables.RESPONSE_REFUSED[name] in error.message


def test_one_turn_of_an_assistant_is_one_message() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so", "annotations": []}]},
        call,
        {**call, "call_id": "d"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "one"}]},
        {"type": "function_call_output", "call_id": "d", "output": "two"},
        {"role": "assistant", "content": "done"},
        {"role": "assistant", "content": "really"},
    ]
    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in "cd"]
    assert messages(items, instructions="answer") == [
        {"role": "system", "content": "answer"},
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "reasoning_content": "hm", "content": "so", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "one"},
        {"role": "tool", "tool_call_id": "d", "content": "two"},
        {"role": "assistant", "content": "done"},
        {"role": "assistant", "content": "really"},
    ]


def test_history_follows_the_instructions() -> None:
    before = [*read(input="a").input_items, *read(input=[{"role": "assistant", "content": "b"}]).input_items]
    call = read_response({**RESPONSE, "instructions": "i"}, model=model(), lora=None, history=before)
    assert [message["content"] for message in call.requests[0].messages] == ["i", "a", "b", "hello"]
    assert [item["content"][0]["text"] for item in call.input_items] == ["hello"]


def test_structured_text_and_forced_calls_become_grammars() -> None:
    wanted = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    params: Any = read(text={"format": wanted}).requests[0].sampling_params
    assert params["structured_outputs"]["json"] == SCHEMA
    assert options(text={"format": wanted}).config["text"]["format"] == {**wanted, "description": None}
    forced: Any = read(tools=[TOOL], tool_choice={"type": "function", "name": "f"}).requests[0].sampling_params
    assert "grammar" in forced["structured_outputs"]


def test_log_probabilities_are_asked_for_by_include_or_top_logprobs() -> None:
    assert options().logprobs is None
    assert options(include=["message.output_text.logprobs"]).logprobs == 0
    assert options(top_logprobs=2).logprobs == 2
    assert options(top_logprobs=0).logprobs is None


def test_the_object_repeats_the_requests_fields() -> None:
    config = options(tools=[TOOL], metadata={"a": "b"}, background=True, store=False, user="u").config
    assert config["tools"] == [{**TOOL, "description": None, "strict": None}]
    told = {name: config[name] for name in ("metadata", "background", "store", "user", "service_tier", "temperature")}
    assert told == {
        "metadata": {"a": "b"},
        "background": True,
        "store": False,
        "user": "u",
        "service_tier": "default",
        "temperature": 1.0,
    }


def test_a_completion_window_gives_seconds_and_the_lowest_priority() -> None:
    for window, seconds in (("2h", 7200), ("8h", 28_800)):
        call = read(background=True, background_options={"completion_window": window})
        assert (call.window, call.priority) == (seconds, 9)
    call = read(background=True, background_options={"completion_window": "2h"}, priority=4)
    assert (call.window, call.priority) == (7200, 4)


@pytest.mark.parametrize(
    "given", [None, {}, {"completion_window": None}, {"completion_window": "soonest"}, {"continuation_id": None}]
)
@pytest.mark.parametrize("background", [True, False])
def test_without_a_completion_window_a_response_is_wanted_at_once(given: Any, background: bool) -> None:
    call = read(background=background, background_options=given)
    assert (call.window, call.priority, call.ignored) == (None, None, {})


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({}, "requires background: true"),
        ({"background": True, "stream": True}, "requires stream: false"),
        ({"background": True, "service_tier": "flex"}, "requires the service_tier auto or default"),
    ],
)
def test_a_completion_window_needs_background_no_stream_and_the_default_tier(
    fields: dict[str, Any], asked: str
) -> None:
    body = {**RESPONSE, "background_options": {"completion_window": "8h"}, **fields}
    error = refusal(read_response, body, model=model(), lora=None)
    assert (error.param, error.code) == ("background_options.completion_window", "invalid_request")
    assert asked in error.message


def test_a_continuation_id_is_named_as_ignored() -> None:
    call = read(background=True, background_options={"completion_window": "2h", "continuation_id": "a", "x": 1})
    assert list(call.ignored) == ["background_options.x", "background_options.continuation_id"]
