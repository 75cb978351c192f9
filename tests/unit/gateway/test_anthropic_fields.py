"""The body of `POST /v1/messages`: how each field is translated, and which ones are refused."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_gateway.anthropic import messages as anthropic_content
from headrace_gateway.anthropic.fields import read_counted, read_message
from headrace_gateway.errors import ApiError
from headrace_gateway.http.broker_errors import unavailable
from headrace_gateway.http.json import anthropic_error, is_anthropic
from headrace_gateway.requests import field_tables
from headrace_gateway.requests.call import Call, MessageOptions
from headrace_wire.chat import MAX_MESSAGES
from unit.gateway.bodies import JSON, model, outcome, refusal

USER: dict[str, Any] = {"role": "user", "content": "hello"}
BODY: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [USER]}
TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}
IMAGE: dict[str, Any] = {"type": "image", "source": {"type": "url", "url": "http://x"}}
REASONING: Any = {"thinking": "enable_thinking", "reasoning_effort": True, "reasoning_parser": "think"}
CALLING: Any = {"tool_parser": "hermes"}


def read(features: dict[str, Any] | None = None, **fields: Any) -> Call:
    return read_message({**BODY, **fields}, model=model(**(features or {})), lora=None)


def request(features: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    (read_request,) = read(features, **fields).requests
    return read_request.to_kwargs()


def messages(*turns: tuple[str, Any], **fields: Any) -> list[dict[str, Any]]:
    given = [{"role": role, "content": content} for role, content in turns]
    found: list[dict[str, Any]] = request(messages=given, **fields)["messages"]
    return found


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": each} for each in texts]


def test_the_system_prompt_comes_first_and_blocks_of_text_are_lines() -> None:
    assert messages(("user", text("a", "b")), system=text("x", "y")) == [
        {"role": "system", "content": "x\ny"},
        {"role": "user", "content": "a\nb"},
    ]
    assert messages(("user", "a"), system="x")[0] == {"role": "system", "content": "x"}
    assert messages(("user", "a"), system=[]) == [{"role": "user", "content": "a"}]


def test_consecutive_turns_of_one_role_are_merged() -> None:
    assert messages(("user", "a"), ("user", text("b")), ("assistant", "c"), ("assistant", "d"), ("user", "e")) == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c\nd"},
        {"role": "user", "content": "e"},
    ]


def test_reasoning_of_consecutive_turns_is_merged() -> None:
    turns = [("assistant", [{"type": "thinking", "thinking": each, "signature": ""}]) for each in ("a", "b")]
    found = messages(("user", "x"), *turns, ("user", "y"), features=REASONING)[1]
    assert found == {"role": "assistant", "content": "", "reasoning_content": "ab"}


def test_turns_of_one_role_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = 0

    class Joint(str):
        def join(self, texts: Iterable[str], /) -> str:
            nonlocal joined
            texts = list(texts)
            joined += sum(map(len, texts))
            return str(self).join(texts)

    monkeypatch.setattr(anthropic_content, "_JOINT", Joint("\n"))
    turns = [("assistant", "abc")] * (MAX_MESSAGES - 1)
    assert len(messages(*turns, ("user", "x"))) == 2
    assert joined == 3 * (MAX_MESSAGES - 1) + 1


def test_calls_and_their_results_become_those_of_a_chat() -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": "é"}}
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": text("one", "two")},
        {"type": "text", "text": "and?"},
        {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no such file", "is_error": True},
        {"type": "tool_result", "tool_use_id": "toolu_3"},
    ]
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    assert messages(("user", "a"), ("assistant", [thought, *text("b"), use]), ("user", results)) == [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "b",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "toolu_1", "type": "function", "function": {"name": "f", "arguments": '{"a":"é"}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "one\ntwo"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no such file"},
        {"role": "tool", "tool_call_id": "toolu_3", "content": ""},
        {"role": "user", "content": "and?"},
    ]


def test_the_assistants_last_message_is_continued() -> None:
    begun = [USER, {"role": "assistant", "content": "the"}]
    asked = request(messages=begun)
    assert (asked["continue_final_message"], asked["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in request()


def test_tools_and_their_choice_become_those_of_a_chat() -> None:
    tool = {**TOOL, "description": "d", "type": "custom", "cache_control": {"type": "ephemeral"}}
    shown = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "description": "d"}}
    assert request(CALLING, tools=[tool])["tools"] == [shown]
    for choice, forced in (({"type": "auto"}, False), ({"type": "any"}, True), ({"type": "tool", "name": "f"}, True)):
        asked = request(CALLING, tools=[TOOL], tool_choice=choice)
        assert ("structured_outputs" in asked["sampling_params"]) == forced
    options = read(CALLING, tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True}).options
    assert isinstance(options, MessageOptions)
    assert (options.parallel_tool_calls, options.tool_parser, options.tools[0].name) == (False, "hermes", "f")
    assert "tools" not in request(CALLING, tools=[TOOL], tool_choice={"type": "none"})


@pytest.mark.parametrize(
    ("thinking", "switched", "shown"),
    [
        (None, False, False),
        ({"type": "disabled"}, False, False),
        ({"type": "adaptive"}, True, True),
        ({"type": "enabled", "budget_tokens": 1024}, True, True),
        ({"type": "enabled", "budget_tokens": 1024, "display": "omitted"}, True, False),
    ],
)
def test_thinking_switches_the_templates_reasoning(
    thinking: dict[str, Any] | None, switched: bool, shown: bool
) -> None:
    call = read(REASONING, thinking=thinking)
    assert call.requests[0].chat_template_kwargs == {"enable_thinking": switched}
    assert isinstance(call.options, MessageOptions)
    assert call.options.shows_thinking == shown
    assert "chat_template_kwargs" not in request(thinking={"type": "adaptive"})  # a model that does not reason


def test_the_effort_reaches_a_template_that_reads_it() -> None:
    config = {"effort": "xhigh"}
    variables = request(REASONING, output_config=config)["chat_template_kwargs"]
    assert variables == {"enable_thinking": False, "reasoning_effort": "xhigh"}
    assert "chat_template_kwargs" not in request(output_config=config)


def test_sampling_fields_and_stop_sequences_are_translated() -> None:
    schema = {"type": "object"}
    options = {"format": {"type": "json_schema", "schema": schema}}
    sampling = request(
        temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["x"], output_config=options, service_tier="auto"
    )["sampling_params"]
    assert sampling.pop("structured_outputs")["json"] == schema
    assert sampling == {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "stop": ["x"], "max_tokens": 9}


def test_a_count_reads_the_same_prompt() -> None:
    fields: dict[str, Any] = {"system": "s", "tools": [TOOL], "thinking": {"type": "adaptive"}}
    known = model(**CALLING, **REASONING)
    counted = read_counted({"model": "m", "messages": [USER], **fields}, model=known, lora=None).requests[0]
    served = read_message({**BODY, **fields}, model=known, lora=None).requests[0]
    for name in ("messages", "tools", "chat_template_kwargs"):
        assert getattr(counted, name) == getattr(served, name) is not None
    assert list(read_counted(BODY, model=known, lora=None).ignored) == ["max_tokens"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens is required"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [USER] * (MAX_MESSAGES + 1)}, f"messages must hold at most {MAX_MESSAGES} messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages[0].content[0].type must be one of text, tool_result, got 'image'",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}]}
                ]
            },
            "messages[0].content[0].content[0].type must be one of text, got 'image'",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "'tool_use'"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]}, "'redacted_thinking'"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f"}]}]},
            "messages[0].content[0].input",
        ),
        ({"system": 1}, "system"),
        ({"system": [IMAGE]}, "system[0].type must be one of text, got 'image'"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": "x"}, "top_k"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        (
            {"tools": [{**TOOL, "input_schema": {"const": 2**70}}]},
            "tools[0].input_schema must hold integers of 64 bits",
        ),
        ({"tools": [{**TOOL, "name": "f g"}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "distinct names"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice any needs tools"),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "all"}}, "thinking.display"),
        ({"thinking": {"type": "much"}}, "thinking.type must be"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {}}}, "tools": [TOOL]},
            "output_config.format excludes tools",
        ),
        *(({name: "x"}, name) for name in field_tables.MESSAGES_REFUSED),
    ],
)
def test_each_problem_names_its_field(fields: dict[str, Any], named: str) -> None:
    error = refusal(read_message, {**BODY, **fields}, model=model(**CALLING), lora=None)
    assert named in error.message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n": 2, "thread": {}}, "n thread"),
        ({"messages": [{**USER, "name": "x"}]}, "messages[].name"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}]},
            "messages[].content[].b",
        ),
        ({"tools": [TOOL, {"type": "bash_20250124", "name": "bash"}]}, "tools[bash_20250124]"),
        ({"tools": [{**TOOL, "colour": 1}]}, "tools[].colour"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"output_config": {"effort": "high"}}, "output_config.effort"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        *(({"context_management": {"edits": edits}}, "context_management") for edits in (5, True, "x", {"a": 1}, [5])),
        ({"speed": "fast"}, "speed"),
    ],
)
def test_what_has_no_effect_is_ignored_and_named(fields: dict[str, Any], named: str) -> None:
    call = read_message({**BODY, **fields}, model=model(**CALLING), lora=None)
    assert list(call.ignored) == named.split()
    assert "colour" not in repr([each.to_kwargs() for each in call.requests])


def test_a_block_as_the_sdk_sends_it_back_is_accepted() -> None:
    """`model_dump()` writes null for every field that the answer does not have."""
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {"x": None}, "caller": None, "toolset_name": None}
    text = {"type": "text", "text": "so", "citations": None}
    result = {"type": "tool_result", "tool_use_id": "t", "content": None, "is_error": None, "cache_control": None}
    turns = [USER, {"role": "assistant", "content": [text, use]}, {"role": "user", "content": [result]}]
    call = read_message({**BODY, "tools": [TOOL], "messages": turns}, model=model(**CALLING), lora=None)
    assert call.ignored == {}
    (_, turn, _) = call.requests[0].messages or ()
    assert turn["tool_calls"][0]["function"]["arguments"] == '{"x":null}'


_WORDS = st.sampled_from(
    (
        *("type", "text", "role", "content", "user", "assistant", "tool_use", "tool_result", "thinking", "enabled"),
        *(
            "tool_use_id",
            "input",
            "id",
            "custom",
            "input_schema",
            "auto",
            "tool",
            "format",
            "schema",
            "effort",
            "name",
            "edits",
        ),
    )
)
_PARTS = st.recursive(
    st.one_of(_WORDS, JSON),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_WORDS, inner, max_size=4)),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(sorted(field_tables.MESSAGES - {"model"})), _PARTS, max_size=4))
def test_any_object_is_read_or_refused(body: dict[str, Any]) -> None:
    for read_body in (read_message, read_counted):
        error = outcome(read_body, {**BODY, **body}, model=model(**CALLING, **REASONING), lora=None)
        assert error is None or (error.status == 400 and error.message)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ApiError(400, "", "unsupported", "m"), 400, "invalid_request_error"),
        (ApiError(401, "", "invalid_api_key", "m"), 401, "authentication_error"),
        (ApiError(403, "", "host_not_allowed", "m"), 403, "permission_error"),
        (ApiError(404, "", "not_found", "m"), 404, "not_found_error"),
        (ApiError(413, "", "request_too_large", "m"), 413, "request_too_large"),
        (ApiError(422, "", "idempotency_key_reused", "m"), 422, "invalid_request_error"),
        (ApiError(429, "", "quota_exceeded", "m"), 429, "rate_limit_error"),
        (ApiError(429, "", "queue_full", "m"), 529, "overloaded_error"),
        (ApiError(500, "", "engine_error", "m"), 500, "api_error"),
        (ApiError(504, "", "expired", "m"), 504, "timeout_error"),
        (unavailable(), 529, "overloaded_error"),
    ],
)
def test_errors_have_anthropics_statuses_and_types(error: ApiError, status: int, kind: str) -> None:
    body, told = anthropic_error(error, "req_1")
    assert told == status
    assert body == {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": "req_1"}


def test_only_paths_of_anthropics_api_have_its_errors() -> None:
    assert all(map(is_anthropic, ("/v1/messages", "/v1/messages/x", "/v1/messages/count_tokens")))
    assert not any(map(is_anthropic, ("/v1/messagesx", "/v1", "/v1/chat/completions", "/tokenize")))


def test_think_tags_that_are_special_tokens_are_asked_for() -> None:
    call = read_message(BODY, model=model(reasoning_parser="think", special_think_tags=True), lora=None)
    assert call.requests[0].sampling_params["skip_special_tokens"] is False
