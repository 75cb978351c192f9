"""The body of `POST /v1/chat/completions`: how each field is translated, and the error of each invalid one."""

from typing import Any

import pytest
from hypothesis import given, settings
from openai.types.chat import completion_create_params

from headrace_broker import RegisteredModel
from headrace_gateway import field_tables
from headrace_gateway.call import Call, ChatForm
from headrace_gateway.chat_fields import read_chat
from headrace_gateway.errors import ApiError
from unit.gateway.bodies import BODIES, CHAT, JSON, model, outcome, refusal

PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
PAINT: dict[str, Any] = {"type": "function", "function": {"name": "paint", "parameters": PARAMETERS}}
STRICT: dict[str, Any] = {"type": "function", "function": {**PAINT["function"], "strict": True}}
ERASE: dict[str, Any] = {"type": "function", "function": {"name": "erase"}}
NAMED = {"type": "function", "function": {"name": "paint"}}
HERMES = model(tool_parser="hermes")


def read(registered: RegisteredModel | None = None, **fields: Any) -> Call:
    return read_chat({**CHAT, **fields}, model=registered or model(), lora=None)


def sampling(registered: RegisteredModel | None = None, **fields: Any) -> dict[str, Any]:
    return dict(read(registered, **fields).submissions[0]["sampling_params"] or {})


def form(registered: RegisteredModel | None = None, **fields: Any) -> ChatForm:
    made = read(registered, **fields).form
    assert isinstance(made, ChatForm)
    return made


def wrong(registered: RegisteredModel | None = None, **fields: Any) -> ApiError:
    return refusal(read_chat, {**CHAT, **fields}, model=registered or model(), lora=None)


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
        ({"top_p": 0}, "top_p", "invalid_request"),
        ({"n": 65}, "n", "invalid_request"),
        ({"n": 2, "temperature": 0}, "n", "invalid_request"),
        ({"seed": 2**63}, "seed", "invalid_request"),
        ({"seed": 10**5000}, "seed", "invalid_request"),
        ({"stop": [""]}, "stop", "invalid_request"),
        ({"stop": ["a"] * 17}, "stop", "invalid_request"),
        ({"vllm_xargs": 5}, "vllm_xargs", "invalid_request"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "invalid_request"),
        ({"stream": "yes"}, "stream", "invalid_request"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_request"),
        ({"stream": True, "stream_options": []}, "stream_options", "invalid_request"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unsupported_parameter"),
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
        ({"response_format": {"type": "text", "x": 1}}, "response_format.x", "unsupported_parameter"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "invalid_request"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
            "response_format.json_schema.x",
            "unsupported_parameter",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format",
            "invalid_request",
        ),
        ({"store": True}, "store", "unsupported_parameter"),
        ({"store": "no"}, "store", "invalid_request"),
        ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
        ({"verbosity": "low"}, "verbosity", "unsupported_parameter"),
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
        ({"reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "invalid_request"),
        ({"include_reasoning": 1}, "include_reasoning", "invalid_request"),
        ({"return_token_ids": 1}, "return_token_ids", "invalid_request"),
        ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids", "invalid_request"),
        ({"max_new_token": 1}, "max_new_token", "unsupported_parameter"),
        ({"x" * 1000: 1}, "x" * 64, "unsupported_parameter"),
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
        ([{"role": "user", "content": "x", "colour": 1}], "messages[0].colour", "unsupported_parameter"),
        ([{"role": "assistant"}], "messages[0].content", "invalid_request"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls", "invalid_request"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id", "invalid_request"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{}]}], "messages[1]", None),
        ([{"role": "user", "content": "x", "name": "\n"}], "messages[0]", "invalid_request"),
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
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "assistant", "content": None, "tool_calls": calls, "refusal": None, "annotations": [], "audio": None},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "reasoning_content": "hm"},
        {"role": "assistant", "content": None, "refusal": "never"},
    ]
    sent = read(messages=messages).submissions[0]["messages"]
    assert sent == [
        {"role": "system", "content": "be brief"},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
        {"role": "assistant", "content": "no", "reasoning_content": "hm"},
        {"role": "assistant", "content": "never"},
    ]
    (first, *_) = read(model(developer=True), messages=messages).submissions[0]["messages"] or ()
    assert first["role"] == "developer"


def test_one_error_lists_all_problems() -> None:
    error = wrong(colour=1, temperature=-1, n="two", messages=[{"role": "clown"}], max_tokens=0, metadata=5)
    for told in ("colour", "temperature", "n must", "messages[0].role", "max_tokens", "metadata"):
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
    assert read_chat(CHAT, model=None, lora=None).submissions[0]["sampling_params"] == {"max_tokens": 2**31 - 1}
    assert sampling(max_tokens=5)["max_tokens"] == sampling(max_completion_tokens=5)["max_tokens"] == 5
    assert sampling(max_tokens=5, max_completion_tokens=5)["max_tokens"] == 5


def test_an_error_of_min_tokens_uses_the_name_that_the_caller_used() -> None:
    assert wrong(min_tokens=3, max_completion_tokens=2).param == "min_tokens"


def test_logprobs_are_alternatives_of_each_position() -> None:
    assert "logprobs" not in sampling()
    assert "logprobs" not in sampling(logprobs=False)
    assert sampling(logprobs=True)["logprobs"] == 0
    assert sampling(logprobs=True, top_logprobs=7)["logprobs"] == form(logprobs=True, top_logprobs=7).logprobs == 7


def test_usage_in_every_chunk_needs_usage() -> None:
    asked = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    made = form(stream=True, stream_options=asked)
    assert (made.include_usage, made.continuous_usage) == (True, True)
    made = form(stream=True, stream_options={"continuous_usage_stats": True})
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


def test_a_response_format_with_tools_is_refused_unless_tool_choice_is_none() -> None:
    json_object = {"type": "json_object"}
    assert wrong(HERMES, response_format=json_object, tools=[PAINT]).param == "response_format"
    assert wrong(HERMES, response_format=json_object, tools=[PAINT], tool_choice="required").param == "response_format"
    assert sampling(response_format=json_object, tools=[PAINT], tool_choice="none")["structured_outputs"]
    assert sampling(response_format=json_object, tools=[])["structured_outputs"]
    assert "structured_outputs" not in sampling(HERMES, response_format={"type": "text"}, tools=[PAINT])


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
    assert isinstance(call.form, ChatForm)
    assert (call.priority, call.form.service_tier) == (priority, tier)


def test_reasoning_effort_sets_the_variables_that_the_template_reads() -> None:
    def variables(registered: RegisteredModel, **fields: Any) -> Any:
        return read(registered, **fields).submissions[0].get("chat_template_kwargs")

    switched, graded = model(thinking="enable_thinking"), model(reasoning_effort=True)
    assert variables(switched, reasoning_effort="none") == {"enable_thinking": False}
    assert variables(switched, reasoning_effort="low") == {"enable_thinking": True}
    assert variables(graded, reasoning_effort="low") == {"reasoning_effort": "low"}
    assert variables(model(), reasoning_effort="none") is None
    given_too = variables(switched, reasoning_effort="low", chat_template_kwargs={"enable_thinking": False, "x": 1})
    assert given_too == {"enable_thinking": False, "x": 1}


def test_a_message_can_be_continued() -> None:
    request = read(continue_final_message=True, add_generation_prompt=False).submissions[0]
    assert (request["continue_final_message"], request["add_generation_prompt"]) == (True, False)


def test_metadata_and_the_adapter_are_kept() -> None:
    call = read_chat({**CHAT, "metadata": {"a": "b"}}, model=model(), lora="french")
    assert isinstance(call.form, ChatForm)
    assert call.form.metadata == {"a": "b"}
    assert call.submissions[0]["lora"] == "french"


@pytest.mark.parametrize(
    ("tools", "param", "code"),
    [
        (5, "tools", "invalid_request"),
        ([PAINT] * 129, "tools", "invalid_request"),
        ([PAINT, PAINT], "tools", "invalid_request"),
        ([{"type": "custom", "custom": {"name": "x"}}], "tools[0].type", "unsupported"),
        (["paint"], "tools[0].type", "unsupported"),
        ([PAINT, {"type": "function", "function": {"name": "a b"}}], "tools[1].function.name", "invalid_request"),
        ([{"type": "function", "function": {"name": "x" * 65}}], "tools[0].function.name", "invalid_request"),
        ([{"type": "function", "function": {}}], "tools[0].function.name", "invalid_request"),
        ([{**PAINT, "strict": True}], "tools[0].strict", "unsupported_parameter"),
        (
            [{"type": "function", "function": {"name": "x", "parameters": "none"}}],
            "tools[0].function.parameters",
            "invalid_request",
        ),
        (
            [{"type": "function", "function": {"name": "x", "description": 5}}],
            "tools[0].function.description",
            "invalid_request",
        ),
        (
            [{"type": "function", "function": {"name": "x", "strict": 1}}],
            "tools[0].function.strict",
            "invalid_request",
        ),
        (
            [{"type": "function", "function": {"name": "x", "colour": 1}}],
            "tools[0].function.colour",
            "unsupported_parameter",
        ),
    ],
)
def test_an_invalid_tool_is_reported_with_its_index(tools: Any, param: str, code: str) -> None:
    error = wrong(HERMES, tools=tools)
    assert (error.param, error.code) == (param, code)


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("sometimes", "tool_choice"),
        (5, "tool_choice"),
        ({"type": "custom"}, "tool_choice"),
        ({"type": "function", "function": {"name": "swim"}}, "tool_choice.function.name"),
        ({"type": "function", "name": "paint"}, "tool_choice.function.name"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "tool_choice.allowed_tools"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": [NAMED]}}, "tool_choice.allowed_tools"),
    ],
)
def test_an_invalid_tool_choice_is_reported(choice: Any, param: str) -> None:
    assert wrong(HERMES, tools=[PAINT], tool_choice=choice).param == param


def test_a_forced_choice_needs_tools() -> None:
    assert wrong(tool_choice="required").param == "tool_choice"
    read(tool_choice="none")
    read(tool_choice="auto")


def test_no_choice_hides_the_tools() -> None:
    call = read(HERMES, tools=[PAINT], tool_choice="none")
    assert "tools" not in call.submissions[0]
    assert isinstance(call.form, ChatForm)
    assert (call.form.tool_parser, call.form.tools) == (None, ())


def test_tools_are_shown_to_the_template_and_read_by_the_models_parser() -> None:
    call = read(HERMES, tools=[PAINT, ERASE])
    assert call.submissions[0]["tools"] == [PAINT, ERASE]
    assert isinstance(call.form, ChatForm)
    assert call.form.tool_parser == "hermes"
    assert [tool.name for tool in call.form.tools] == ["paint", "erase"]
    assert "structured_outputs" not in (call.submissions[0]["sampling_params"] or {})


def test_a_template_without_tool_support_accepts_tools_only_if_a_call_is_forced() -> None:
    plain = model(tools=False)
    error = wrong(plain, tools=[PAINT])
    assert (error.param, error.code) == ("tools", "unsupported")
    for choice in ("required", NAMED):
        call = read(plain, tools=[PAINT], tool_choice=choice)
        assert "tools" not in call.submissions[0]
        assert "grammar" in (call.submissions[0]["sampling_params"] or {})["structured_outputs"]


def test_allowed_tools_bind_the_choice_but_all_are_shown() -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    call = read(HERMES, tools=[PAINT, ERASE], tool_choice=choice)
    assert call.submissions[0]["tools"] == [PAINT, ERASE]
    assert isinstance(call.form, ChatForm)
    assert [tool.name for tool in call.form.tools] == ["paint"]
    grammar = (call.submissions[0]["sampling_params"] or {})["structured_outputs"]["grammar"]
    assert "paint" in grammar
    assert "erase" not in grammar


def test_a_forced_call_excludes_structured_outputs() -> None:
    fields: dict[str, Any] = {"tools": [PAINT], "structured_outputs": {"regex": "a"}}
    assert wrong(HERMES, tool_choice="required", **fields).param == "tool_choice"
    assert sampling(HERMES, **fields)["structured_outputs"] == {"regex": "a"}


def test_tools_too_large_for_a_grammar_are_reported() -> None:
    large = {"type": "function", "function": {"name": "x", "parameters": {"enum": ["y" * 70_000]}}}
    assert wrong(HERMES, tools=[large], tool_choice="required").param == "tools"
    large["function"]["strict"] = True
    assert wrong(HERMES, tools=[large]).param == "tools"


def test_strict_functions_constrain_calls_that_the_model_chooses() -> None:
    grammar = sampling(HERMES, tools=[STRICT, ERASE])["structured_outputs"]["grammar"]
    assert "paint" in grammar
    assert form(HERMES, tools=[STRICT]).tool_parser == "hermes"
    one = sampling(HERMES, tools=[STRICT], parallel_tool_calls=False)["structured_outputs"]["grammar"]
    assert one != sampling(HERMES, tools=[STRICT])["structured_outputs"]["grammar"]


def test_strict_functions_constrain_nothing_if_no_text_marks_a_call() -> None:
    for registered in (model(tool_parser="hermes", special_tags=True), model(tool_parser="mistral"), model()):
        assert "structured_outputs" not in sampling(registered, tools=[STRICT])
    assert sampling(HERMES, tools=[STRICT], structured_outputs={"regex": "a"})["structured_outputs"] == {"regex": "a"}


def test_reasoning_that_is_switched_off_does_not_come_before_a_forced_call() -> None:
    thinker = model(tool_parser="hermes", reasoning_parser="think", thinking="enable_thinking")
    forced: dict[str, Any] = {"tools": [PAINT], "tool_choice": "required"}

    def grammar(**fields: Any) -> str:
        return str(sampling(thinker, **forced, **fields)["structured_outputs"]["grammar"])

    assert "</think>" in grammar().replace("\\", "")
    assert "</think>" in grammar(reasoning_effort="low").replace("\\", "")
    for off in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        assert "think" not in grammar(**off)


@pytest.mark.parametrize(
    ("registered", "fields", "kept"),
    [
        (model(tool_parser="mistral", special_tags=True), {"tools": [PAINT]}, True),
        (model(tool_parser="mistral", special_tags=True), {"tools": [PAINT], "tool_choice": "required"}, False),
        (model(tool_parser="mistral", special_tags=True), {}, False),
        (HERMES, {"tools": [PAINT]}, False),
        (model(reasoning_parser="mistral"), {}, True),
        (model(reasoning_parser="openai"), {}, True),
        (model(reasoning_parser="think"), {}, False),
        (model(reasoning_parser="openai"), {"structured_outputs": {"regex": "a"}}, False),
        (model(reasoning_parser="openai"), {"skip_special_tokens": True}, False),
    ],
)
def test_tags_that_are_special_tokens_are_kept_for_their_parsers(
    registered: RegisteredModel, fields: dict[str, Any], kept: bool
) -> None:
    assert (sampling(registered, **fields).get("skip_special_tokens") is False) == kept


def test_a_parser_that_only_newer_gateways_know_counts_as_none() -> None:
    made = form(model(tool_parser="of tomorrow", reasoning_parser="of tomorrow"), tools=[PAINT])
    assert (made.tool_parser, made.reasoning_parser) == (None, None)


@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_a_number_in_a_tool_that_the_envelope_cannot_hold_is_refused(choice: str) -> None:
    tool = {"type": "function", "function": {"name": "paint", "parameters": {"const": 2**70}}}
    for registered in (None, HERMES, model(tools=False)):
        body = {**CHAT, "tools": [tool], "tool_choice": choice}
        error = refusal(read_chat, body, model=registered, lora=None)
        assert error.param == "tools[0].function.parameters"
        assert "64 bits" in error.message


@settings(max_examples=100, deadline=None)
@given(body=BODIES, valid=BODIES.map(lambda body: {**body, **CHAT}), messages=JSON, tools=JSON)
def test_any_body_is_read_or_refused(body: Any, valid: Any, messages: Any, tools: Any) -> None:
    thinker = model(tool_parser="hermes", reasoning_parser="think", thinking="enable_thinking")
    for each in (body, valid, {**CHAT, "messages": [messages]}, {**CHAT, "tools": [PAINT, tools]}):
        for registered in (None, thinker):
            error = outcome(read_chat, {"model": "m", **each}, model=registered, lora=None)
            assert error is None or (error.status == 400 and error.message)
