"""What a request message may hold, and how bad ones are refused."""

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_broker.errors import InvalidRequestError
from headrace_broker.messages import MAX_MESSAGES, MAX_PROMPT_TOKENS, MAX_TEXT_BYTES, GenerateRequest

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
    st.sampled_from(["prompt", "prompt_token_ids", "messages", "sampling_params", "model", "lora", "other"]), JSON_LIKE
)


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


@given(HOSTILE)
def test_whatever_a_stranger_sends_is_parsed_or_refused(kwargs: dict[str, Any]) -> None:
    try:
        request = GenerateRequest.parse(kwargs)
    except InvalidRequestError:
        return
    assert GenerateRequest.parse(request.to_kwargs()) == request


@pytest.mark.parametrize("kwargs", [None, 7, "text", [], [("prompt", "x")]])
def test_a_request_that_is_no_map_is_refused(kwargs: Any) -> None:
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
        ({}, "not none"),
        ({"prompt": None}, "not none"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "not prompt and prompt_token_ids"),
    ],
)
def test_exactly_one_kind_of_prompt_is_demanded(kwargs: dict[str, Any], found: str) -> None:
    assert found in problems_of(kwargs)[0]


@pytest.mark.parametrize(
    ("kwargs", "complaint"),
    [
        ({"prompt": ""}, "prompt must not be empty"),
        ({"prompt": 5}, "prompt must be a string, not 5"),
        ({"prompt": "\ud800"}, "lone surrogates"),
        ({"prompt": "é" * (MAX_TEXT_BYTES // 2 + 1)}, f"at most {MAX_TEXT_BYTES} bytes of UTF-8"),
        ({"prompt_token_ids": []}, f"1 to {MAX_PROMPT_TOKENS} token ids, not 0"),
        ({"prompt_token_ids": [0] * (MAX_PROMPT_TOKENS + 1)}, f"not {MAX_PROMPT_TOKENS + 1}"),
        ({"prompt_token_ids": [1, -2]}, "not -2 at position 1"),
        ({"prompt_token_ids": [True]}, "not True at position 0"),
        ({"prompt_token_ids": "12"}, "must be a list"),
        ({"messages": {}}, "must be a list"),
        ({"messages": [{"role": "user"}]}, "position 0"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "position 0"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "content of message 0"),
        ({"messages": [{"role": "", "content": "x"}]}, "role of message 0"),
        ({"messages": [{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1)}, "chat messages"),
        ({"messages": [{"role": "user", "content": "x" * (MAX_TEXT_BYTES // 2 + 1)}] * 2}, "text of all messages"),
        ({"prompt": "x", "sampling_params": [1]}, "sampling_params must be a map, not list"),
    ],
)
def test_a_prompt_outside_the_contract_is_refused_with_its_limit(kwargs: dict[str, Any], complaint: str) -> None:
    assert any(complaint in problem for problem in problems_of(kwargs))


@pytest.mark.parametrize("name", ["sql", "a.b-c_d", "7", "x" * 128, "a..b"])
def test_an_adapter_is_asked_for_by_its_name(name: str) -> None:
    request = GenerateRequest.parse({"prompt": "x", "lora": name})
    assert request.lora == name
    assert GenerateRequest.parse(request.to_kwargs()) == request


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "/x", "a/b", "a\\b", ".hidden", "-x", "x" * 129, "a b", "a\n", "a\0", "é", 5, ["a"], b"a"],
    ids=repr,
)
def test_nothing_that_could_be_a_path_names_an_adapter(name: Any) -> None:
    assert any("lora must be 1 to 128 of the characters" in problem for problem in problems_of({"lora": name}))


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
