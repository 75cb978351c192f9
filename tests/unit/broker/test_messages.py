"""Valid and invalid request messages."""

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_broker.errors import InvalidRequestError
from headrace_broker.messages import GenerateRequest
from headrace_wire.chat import CHAT_OPTIONS, MAX_MESSAGES, MAX_TEXT_BYTES
from headrace_wire.request import MAX_PROMPT_TOKENS
from headrace_wire.sampling import SAMPLING as RULES

TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=50)
TOKEN_IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20)
CHAT = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": TEXT}),
    min_size=1,
    max_size=5,
)
PROMPTS = st.one_of(
    st.fixed_dictionaries({"prompt": TEXT}),
    st.fixed_dictionaries({"prompt_token_ids": TOKEN_IDS}),
    st.fixed_dictionaries({"messages": CHAT}),
)
SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(1, 64),
        "temperature": st.floats(0.01, 5),
        "top_p": st.floats(0.01, 1),
        "top_k": st.integers(-1, 1000),
        "min_p": st.floats(0, 1),
        "seed": st.none() | st.integers(-(2**63), 2**63 - 1),
        "max_tokens": st.integers(100, 4096),
        "min_tokens": st.integers(0, 16),
        "stop": TEXT | st.lists(TEXT, max_size=16),
        "stop_token_ids": TOKEN_IDS,
        "ignore_eos": st.booleans(),
        "logprobs": st.none() | st.integers(0, 20),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.01, 2),
        "skip_special_tokens": st.booleans(),
        "include_stop_str_in_output": st.booleans(),
    },
)
JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
HOSTILE = st.dictionaries(
    st.sampled_from(
        ["prompt", "prompt_token_ids", "messages", "sampling_params", "model", "lora", "other", *CHAT_OPTIONS]
    ),
    JSON_LIKE
    | st.lists(
        st.fixed_dictionaries({"role": st.just("user"), "content": JSON_LIKE}, optional={"tool_calls": JSON_LIKE})
    ),
)


CHAT_OF_ONE = [{"role": "user", "content": "x"}]
NESTED: list[Any] = []
for _ in range(40):
    NESTED = [NESTED]


def problems_of(kwargs: Any) -> tuple[str, ...]:
    with pytest.raises(InvalidRequestError) as refusal:
        GenerateRequest.parse(kwargs)
    return refusal.value.problems


@given(PROMPTS, SAMPLING, st.none() | st.just("served-name"))
def test_a_valid_request_survives_the_wire(prompt: dict[str, Any], params: dict[str, Any], model: str | None) -> None:
    request = GenerateRequest.parse({**prompt, "sampling_params": params, "model": model})
    wire = msgpack.unpackb(msgpack.packb(request.to_kwargs()))
    assert GenerateRequest.parse(wire) == request
    assert request.sampling_params == {name: value for name, value in params.items() if value is not None}


def test_a_chat_with_tools_survives_the_wire_and_null_counts_as_absent() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "grind", "arguments": '{"grain": "rye"}'}}
    chat: dict[str, Any] = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "flour"}, "please"], "name": "miller"},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "reasoning": "hm"},
            {"role": "tool", "content": "done", "tool_call_id": "1"},
            {"role": "assistant", "content": "Here"},
        ],
        "tools": [{"type": "function", "function": {"name": "grind", "parameters": {"type": "object"}}}],
        "chat_template_kwargs": {"mood": "glad"},
        "add_generation_prompt": False,
        "continue_final_message": True,
        "prompt": None,
    }
    request = GenerateRequest.parse(chat)
    assert GenerateRequest.parse(msgpack.unpackb(msgpack.packb(request.to_kwargs()))) == request
    assert request.messages is not None
    assert request.messages[1] == {"role": "assistant", "tool_calls": [call], "reasoning": "hm"}
    assert request.chat_options == {name: chat[name] for name in request.chat_options}
    assert len(request.chat_options) == 4
    assert GenerateRequest.parse({"messages": CHAT_OF_ONE, "tools": None}).chat_options == {}


def test_null_is_the_default_of_every_sampling_parameter() -> None:
    request = GenerateRequest.parse({"prompt": "x", "sampling_params": dict.fromkeys(RULES)})
    assert request.sampling_params == {}
    with pytest.raises(InvalidRequestError, match="min_tokens must be at most max_tokens"):
        GenerateRequest.parse({"prompt": "x", "sampling_params": {"max_tokens": None, "min_tokens": 17}})


def test_numbers_and_arrays_of_numpy_are_sent_as_plain_ones() -> None:
    params = {"temperature": np.float32(0.5), "n": np.int64(2), "stop_token_ids": np.array([3]), "ignore_eos": np.True_}
    request = GenerateRequest.parse({"prompt_token_ids": np.array([1, 2]), "sampling_params": params})
    assert request.prompt_token_ids == [1, 2]
    assert request.sampling_params == {"temperature": 0.5, "n": 2, "stop_token_ids": [3], "ignore_eos": True}
    assert msgpack.packb(request.to_kwargs())
    for wrong in (np.array([1.5]), np.array([[1]]), np.array(1), [np.float64(1)]):
        assert problems_of({"prompt_token_ids": wrong})


def test_the_keys_of_pooling_tasks_are_refused_with_the_name_of_the_task() -> None:
    assert [*problems_of({"prompt": "x", "input": ["y"], "documents": ["z"]})] == [
        "unknown key 'input': the task headrace.embed or headrace.classify takes it",
        "unknown key 'documents': the task headrace.score takes it",
    ]


@given(HOSTILE)
def test_any_input_is_parsed_or_refused(kwargs: dict[str, Any]) -> None:
    try:
        request = GenerateRequest.parse(kwargs)
    except InvalidRequestError:
        return
    assert GenerateRequest.parse(request.to_kwargs()) == request


@pytest.mark.parametrize("kwargs", [None, 7, "text", [], [("prompt", "x")]])
def test_a_request_that_is_not_a_map_is_refused(kwargs: Any) -> None:
    assert "must be a map" in problems_of(kwargs)[0]


def test_all_problems_are_reported_at_once() -> None:
    problems = problems_of(
        {"prompt": "x", "messages": [], "sampling_params": {"top_p": 2, "nonsense": 1}, "modle": "x", "model": 3}
    )
    text = "; ".join(problems)
    for part in ("'modle'", "prompt and messages", "1 to 4096 chat messages", "'nonsense'", "top_p", "model must be"):
        assert part in text


@pytest.mark.parametrize(
    ("kwargs", "found"),
    [
        ({}, "got none"),
        ({"prompt": None}, "got none"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "got prompt and prompt_token_ids"),
    ],
)
def test_exactly_one_kind_of_prompt_is_required(kwargs: dict[str, Any], found: str) -> None:
    assert found in problems_of(kwargs)[0]


@pytest.mark.parametrize(
    ("kwargs", "complaint"),
    [
        ({"prompt": 5}, "prompt must be a string, got 5"),
        ({"prompt": "\ud800"}, "lone surrogate"),
        ({"prompt": "é" * (MAX_TEXT_BYTES // 2 + 1)}, f"at most {MAX_TEXT_BYTES} bytes of UTF-8"),
        ({"prompt_token_ids": []}, f"1 to {MAX_PROMPT_TOKENS} token ids, got 0"),
        ({"prompt_token_ids": [0] * (MAX_PROMPT_TOKENS + 1)}, f"got {MAX_PROMPT_TOKENS + 1}"),
        ({"prompt_token_ids": [1, -2]}, "prompt_token_ids[1] must be at least 0 and at most 2147483647, got -2"),
        ({"prompt_token_ids": [True]}, "prompt_token_ids[0] must be an integer, got true"),
        ({"prompt_token_ids": "12"}, "must be a list"),
        ({"messages": {}}, "must be a list"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is required"),
        ({"messages": [{"role": "user", "content": "x", "nmae": "y"}]}, "got 'nmae'"),
        ({"messages": [7]}, "messages[0] must be a map of role"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "messages[0].content must be a string or a list"),
        ({"messages": [{"role": "user", "content": [7]}]}, "messages[0].content[0] must be a string, got 7"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "only supported type, got 'image_",
        ),
        (
            {"messages": [{"role": "user", "content": ["a", {"type": 7}]}]},
            "messages[0].content[1].type must be text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
            "content[0].text must be a string",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "lone surrogate"),
        ({"messages": [{"role": "user", "content": ["\ud800"]}]}, "lone surrogate"),
        (
            {"messages": [{"role": "user", "content": "x", "name": 5}]},
            "messages[0].name must be a printable string",
        ),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": ""}]}, "messages[0].tool_call_id must be"),
        ({"messages": [{"role": "assistant", "reasoning": 5}]}, "messages[0].reasoning must be a string, got 5"),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages[0].tool_calls must be a list of calls"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls[0].function is required",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 2**64}}}]}
                ]
            },
            "messages[0].tool_calls must hold integers of 64 bits",
        ),
        ({"messages": CHAT_OF_ONE, "tools": "grind"}, "tools must be a list of maps, got a string of length 5"),
        ({"messages": CHAT_OF_ONE, "tools": [{}] * 1025}, "tools must hold at most 1024 tools, got 1025"),
        ({"messages": CHAT_OF_ONE, "tools": [{"a": {1: 2}}]}, "tools must hold only maps with string keys"),
        ({"messages": CHAT_OF_ONE, "tools": [{"a": "\ud800"}]}, "tools must hold valid Unicode text"),
        ({"messages": CHAT_OF_ONE, "tools": [{"a": "x" * MAX_TEXT_BYTES}]}, "messages must be at most"),
        (
            {"messages": CHAT_OF_ONE, "chat_template_kwargs": [1]},
            "must be a map from names to values, got a list",
        ),
        (
            {"messages": CHAT_OF_ONE, "chat_template_kwargs": {"a": NESTED}},
            "chat_template_kwargs must be nested at most",
        ),
        ({"messages": CHAT_OF_ONE, "add_generation_prompt": 1}, "add_generation_prompt must be true or false, got 1"),
        ({"messages": CHAT_OF_ONE, "continue_final_message": True}, "add_generation_prompt must be false when"),
        ({"messages": CHAT_OF_ONE, "chat_template": "{{ x }}"}, "chat_template must be absent"),
        ({"prompt": "x", "tools": [{}]}, "tools must be absent without messages"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role must be"),
        ({"messages": [{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1)}, "chat messages"),
        ({"messages": [{"role": "user", "content": "x" * (MAX_TEXT_BYTES // 2 + 1)}] * 2}, "messages must be at most"),
        ({"prompt": "x", "sampling_params": [1]}, "sampling_params must be a map, got a list"),
    ],
)
def test_an_invalid_prompt_is_refused_with_its_limit(kwargs: dict[str, Any], complaint: str) -> None:
    assert complaint in "; ".join(problems_of(kwargs))


@pytest.mark.parametrize("name", ["sql", "a.b-c_d", "7", "x" * 128, "a..b"])
def test_an_adapter_is_requested_by_name(name: str) -> None:
    request = GenerateRequest.parse({"prompt": "x", "lora": name})
    assert request.lora == name
    assert GenerateRequest.parse(request.to_kwargs()) == request


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "/x", "a/b", "a\\b", ".hidden", "-x", "x" * 129, "a b", "a\n", "a\0", "é", 5, ["a"], b"a"],
    ids=repr,
)
def test_a_path_is_not_an_adapter_name(name: Any) -> None:
    assert "lora must be 1 to 128 of the characters" in "; ".join(problems_of({"lora": name}))


def test_neither_repr_nor_errors_show_what_the_user_wrote() -> None:
    secret = "the patient is called Smith"
    request = GenerateRequest.parse({"prompt": secret, "sampling_params": {"stop": secret}})
    assert secret not in repr(request)
    for kwargs in (
        {"prompt": secret, "messages": secret, "prompt_token_ids": secret},
        {"prompt": secret + "\ud800"},
        {"prompt": [secret]},
        {"messages": [{"role": secret, "content": secret, "extra": secret}]},
        {"prompt": "x", "sampling_params": {"stop": [secret, 3], "seed": secret, "top_p": secret}},
    ):
        assert secret not in "".join(problems_of(kwargs))
