"""The tools of a chat and its reasoning: what the template is shown, what binds the model, who parses its text."""

from typing import Any

import pytest

from headrace_broker import RegisteredModel
from headrace_gateway.chat.fields import read_chat
from headrace_gateway.requests.call import ChatOptions
from unit.gateway.bodies import CHAT, model, refusal
from unit.gateway.chat_bodies import HERMES, NAMED, PAINT, options, read, sampling, wrong

STRICT: dict[str, Any] = {"type": "function", "function": {**PAINT["function"], "strict": True}}
ERASE: dict[str, Any] = {"type": "function", "function": {"name": "erase"}}


def test_a_response_format_with_tools_is_refused_unless_tool_choice_is_none() -> None:
    json_object = {"type": "json_object"}
    assert wrong(HERMES, response_format=json_object, tools=[PAINT]).param == "response_format"
    assert wrong(HERMES, response_format=json_object, tools=[PAINT], tool_choice="required").param == "response_format"
    assert sampling(response_format=json_object, tools=[PAINT], tool_choice="none")["structured_outputs"]
    assert sampling(response_format=json_object, tools=[])["structured_outputs"]
    assert "structured_outputs" not in sampling(HERMES, response_format={"type": "text"}, tools=[PAINT])


@pytest.mark.parametrize(
    ("tools", "param", "code"),
    [
        (5, "tools", "invalid_request"),
        ([PAINT] * 129, "tools", "invalid_request"),
        ([PAINT, PAINT], "tools", "invalid_request"),
        (["paint"], "tools[0].type", "unsupported"),
        ([PAINT, {"type": "function", "function": {"name": "a b"}}], "tools[1].function.name", "invalid_request"),
        ([{"type": "function", "function": {"name": "x" * 65}}], "tools[0].function.name", "invalid_request"),
        ([{"type": "function", "function": {}}], "tools[0].function.name", "invalid_request"),
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
    assert call.requests[0].tools is None
    assert isinstance(call.options, ChatOptions)
    assert (call.options.tool_parser, call.options.tools) == (None, ())


def test_tools_are_shown_to_the_template_and_read_by_the_models_parser() -> None:
    call = read(HERMES, tools=[PAINT, ERASE])
    assert call.requests[0].tools == [PAINT, ERASE]
    assert isinstance(call.options, ChatOptions)
    assert call.options.tool_parser == "hermes"
    assert [tool.name for tool in call.options.tools] == ["paint", "erase"]
    assert "structured_outputs" not in call.requests[0].sampling_params


def test_a_template_without_tool_support_accepts_tools_only_if_a_call_is_forced() -> None:
    plain = model(tools=False)
    error = wrong(plain, tools=[PAINT])
    assert (error.param, error.code) == ("tools", "unsupported")
    for choice in ("required", NAMED):
        call = read(plain, tools=[PAINT], tool_choice=choice)
        assert call.requests[0].tools is None
        assert "grammar" in call.requests[0].sampling_params["structured_outputs"]


def test_allowed_tools_bind_the_choice_but_all_are_shown() -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    call = read(HERMES, tools=[PAINT, ERASE], tool_choice=choice)
    assert call.requests[0].tools == [PAINT, ERASE]
    assert isinstance(call.options, ChatOptions)
    assert [tool.name for tool in call.options.tools] == ["paint"]
    grammar = call.requests[0].sampling_params["structured_outputs"]["grammar"]
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
    assert options(HERMES, tools=[STRICT]).tool_parser == "hermes"
    one = sampling(HERMES, tools=[STRICT], parallel_tool_calls=False)["structured_outputs"]["grammar"]
    assert one != sampling(HERMES, tools=[STRICT])["structured_outputs"]["grammar"]


def test_strict_functions_constrain_nothing_if_no_text_marks_a_call() -> None:
    for registered in (model(tool_parser="hermes", special_tags=True), model(tool_parser="mistral"), model()):
        assert "structured_outputs" not in sampling(registered, tools=[STRICT])
    assert sampling(HERMES, tools=[STRICT], structured_outputs={"regex": "a"})["structured_outputs"] == {"regex": "a"}


def test_reasoning_effort_sets_the_variables_that_the_template_reads() -> None:
    def variables(registered: RegisteredModel, **fields: Any) -> Any:
        return read(registered, **fields).requests[0].chat_template_kwargs

    switched, graded = model(thinking="enable_thinking"), model(reasoning_effort=True)
    assert variables(switched, reasoning_effort="none") == {"enable_thinking": False}
    assert variables(switched, reasoning_effort="low") == {"enable_thinking": True}
    assert variables(graded, reasoning_effort="low") == {"reasoning_effort": "low"}
    assert variables(model(), reasoning_effort="none") is None
    given_too = variables(switched, reasoning_effort="low", chat_template_kwargs={"enable_thinking": False, "x": 1})
    assert given_too == {"enable_thinking": False, "x": 1}


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
        *((model(reasoning_parser=each, special_think_tags=True), {}, True) for each in ("mistral", "openai", "think")),
        (model(reasoning_parser="think"), {}, False),
        (model(reasoning_parser="think", special_think_tags=True), {"structured_outputs": {"regex": "a"}}, True),
        (model(reasoning_parser="openai", special_think_tags=True), {"structured_outputs": {"regex": "a"}}, False),
        (model(reasoning_parser="openai", special_think_tags=True), {"skip_special_tokens": True}, False),
    ],
)
def test_tags_that_are_special_tokens_are_kept_for_their_parsers(
    registered: RegisteredModel, fields: dict[str, Any], kept: bool
) -> None:
    assert (sampling(registered, **fields).get("skip_special_tokens") is False) == kept


def test_reasoning_is_not_sought_in_text_without_its_tags() -> None:
    thinker = model(reasoning_parser="think", special_think_tags=True)
    assert options(thinker).reasoning_parser == "think"
    assert options(thinker, skip_special_tokens=True).reasoning_parser is None


def test_reasoning_is_sought_before_a_text_that_follows_a_grammar() -> None:
    fields: dict[str, Any] = {"response_format": {"type": "json_object"}}
    assert options(model(reasoning_parser="think"), **fields).reasoning_parser == "think"
    assert options(model(reasoning_parser="openai"), **fields).reasoning_parser is None


def test_a_parser_that_only_newer_gateways_know_counts_as_none() -> None:
    made = options(model(tool_parser="of tomorrow", reasoning_parser="of tomorrow"), tools=[PAINT])
    assert (made.tool_parser, made.reasoning_parser) == (None, None)


@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_a_number_in_a_tool_that_the_envelope_cannot_hold_is_refused(choice: str) -> None:
    tool = {"type": "function", "function": {"name": "paint", "parameters": {"const": 2**70}}}
    for registered in (None, HERMES, model(tools=False)):
        body = {**CHAT, "tools": [tool], "tool_choice": choice}
        error = refusal(read_chat, body, model=registered, lora=None)
        assert error.param == "tools[0].function.parameters"
        assert "64 bits" in error.message
