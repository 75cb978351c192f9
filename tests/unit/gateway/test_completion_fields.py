"""The body of `POST /v1/completions`: how each field is translated, and the error of each invalid one."""

from typing import Any

import pytest
from hypothesis import given, settings
from openai.types import completion_create_params

from headrace_gateway.completions.fields import MAX_CHOICES, MAX_PROMPTS, read_completion
from headrace_gateway.errors import ApiError
from headrace_gateway.requests import field_tables
from headrace_gateway.requests.call import Call, CompletionOptions
from unit.gateway.bodies import BODIES, COMPLETION, JSON, outcome, refusal
from unit.gateway.test_chat_fields import SAMPLING_VALUES


def read(**fields: Any) -> Call:
    return read_completion({**COMPLETION, **fields}, lora=None)


def sampling(**fields: Any) -> dict[str, Any]:
    return dict(read(**fields).requests[0].sampling_params)


def options(**fields: Any) -> CompletionOptions:
    made = read(**fields).options
    assert isinstance(made, CompletionOptions)
    return made


def wrong(**fields: Any) -> ApiError:
    return refusal(read_completion, {**COMPLETION, **fields}, lora=None)


@pytest.mark.parametrize("name", ["CompletionCreateParamsNonStreaming", "CompletionCreateParamsStreaming"])
def test_every_field_of_openai_is_in_a_table(name: str) -> None:
    fields = set(completion_create_params.CompletionCreateParamsBase.__annotations__)
    fields |= set(getattr(completion_create_params, name).__annotations__)
    known = field_tables.COMPLETION | set(field_tables.SAMPLING) | set(field_tables.IGNORED) | set(field_tables.REFUSED)
    assert fields - known == set()


@pytest.mark.parametrize("name", field_tables.REFUSED)
def test_unsupported_fields_are_refused_by_name(name: str) -> None:
    error = wrong(**{name: 1})
    assert (error.param, error.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize("name", sorted(field_tables.CHAT - field_tables.COMPLETION))
def test_a_field_of_chats_is_ignored_here(name: str) -> None:
    assert list(read(**{name: 1}).ignored) == [name]


@pytest.mark.parametrize("name", field_tables.IGNORED)
def test_fields_without_effect_are_accepted(name: str) -> None:
    assert read(**{name: {"any": "value"}}) == read()


@pytest.mark.parametrize("name", sorted(field_tables.COMPLETION | set(field_tables.SAMPLING)))
def test_null_counts_as_absent(name: str) -> None:
    if name not in COMPLETION:
        assert read(**{name: None}) == read()


@pytest.mark.parametrize("name", field_tables.SAMPLING)
def test_each_sampling_parameter_goes_into_the_queue(name: str) -> None:
    assert sampling(**{name: SAMPLING_VALUES[name]})[field_tables.SAMPLING[name]] == SAMPLING_VALUES[name]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": None}, "prompt", "invalid_request"),
        ({"prompt": []}, "prompt", "invalid_request"),
        ({"prompt": 5}, "prompt", "invalid_request"),
        ({"prompt": {"text": "x"}}, "prompt", "invalid_request"),
        ({"prompt": [-1]}, "prompt[0]", "invalid_request"),
        ({"prompt": [True]}, "prompt[0]", "invalid_request"),
        ({"prompt": [[1], []]}, "prompt[1]", "invalid_request"),
        ({"prompt": [[1], [1.5]]}, "prompt[1][0]", "invalid_request"),
        ({"prompt": ["a", {}]}, "prompt[1]", "invalid_request"),
        ({"prompt": ["a"] * (MAX_PROMPTS + 1)}, "prompt", "invalid_request"),
        ({"max_tokens": -1, "echo": True}, "max_tokens", "invalid_request"),
        ({"max_tokens": "5"}, "max_tokens", "invalid_request"),
        ({"logprobs": True}, "logprobs", "invalid_request"),
        ({"logprobs": 21}, "logprobs", "invalid_request"),
        ({"echo": 1}, "echo", "invalid_request"),
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
        ({"best_of": 2}, "best_of", "unsupported_parameter"),
        ({"best_of": True}, "best_of", "invalid_request"),
        ({"best_of": 2, "n": 3}, "best_of", "unsupported_parameter"),
        ({"n": 0}, "n", "invalid_request"),
        ({"n": 2, "temperature": 0}, "n", "invalid_request"),
        ({"return_token_ids": 1}, "return_token_ids", "invalid_request"),
        ({"stream_options": {}}, "stream_options", "invalid_request"),
        ({"max_token": 5}, "max_token", "unsupported_parameter"),
    ],
)
def test_an_invalid_value_is_reported_with_its_field(fields: dict[str, Any], param: str, code: str) -> None:
    error = wrong(**fields)
    assert (error.param, error.code) == (param, code)


def test_an_unknown_name_is_told_with_the_one_that_it_resembles() -> None:
    assert "did you mean max_tokens?" in wrong(max_token=5).message


def test_one_error_lists_all_problems() -> None:
    error = wrong(max_token=1, temperature=-1, prompt=["a", [], [-1]], max_tokens="x", return_token_ids=5)
    for told in ("max_token", "temperature", "prompt[1]", "prompt[2]", "max_tokens", "return_token_ids"):
        assert told in error.message


def test_the_number_of_reported_problems_is_limited() -> None:
    assert len(wrong(prompt=[{}] * MAX_PROMPTS).message) < 2000


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ("a", [{"prompt": "a"}]),
        (["a"], [{"prompt": "a"}]),
        (["a", "b"], [{"prompt": "a"}, {"prompt": "b"}]),
        ([1, 2], [{"prompt_token_ids": [1, 2]}]),
        ([[1, 2], [3]], [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3]}]),
        (["a", [3]], [{"prompt": "a"}, {"prompt_token_ids": [3]}]),
    ],
)
def test_each_prompt_is_a_request(prompt: Any, sent: list[Any]) -> None:
    call = read(prompt=prompt)
    assert [each.to_kwargs() for each in call.requests] == [
        {**each, "sampling_params": {"max_tokens": 16}} for each in sent
    ]
    assert isinstance(call.options, CompletionOptions)
    assert call.options.num_prompts == len(sent)


def test_the_adapter_goes_with_every_prompt() -> None:
    call = read_completion({**COMPLETION, "prompt": ["a", "b"]}, lora="french")
    assert [each.lora for each in call.requests] == ["french", "french"]


def test_the_choices_of_all_prompts_are_limited() -> None:
    assert read(prompt=["a"] * 16, n=64).num_choices == MAX_CHOICES
    refusal = wrong(prompt=["a"] * 17, n=64)
    assert refusal.param == "n"
    assert refusal.message == "prompts times n must be at most 1024, got 1088: send several requests"


def test_large_sampling_parameters_are_not_repeated_for_many_prompts() -> None:
    many: dict[str, Any] = {"allowed_token_ids": list(range(20_000))}
    assert wrong(prompt=["a"] * MAX_PROMPTS, **many).param == "prompt"
    assert len(read(prompt=["a"] * 8, **many).requests) == 8


def test_with_max_tokens_0_only_the_prompt_is_scored() -> None:
    made = options(max_tokens=0, echo=True, logprobs=1)
    assert made.drop_generated
    assert sampling(max_tokens=0, echo=True, logprobs=1) == {"max_tokens": 1, "logprobs": 1, "prompt_logprobs": 1}


def test_the_echo_of_token_ids_needs_their_texts() -> None:
    assert sampling(prompt=[1, 2], echo=True)["prompt_logprobs"] == 0
    assert "prompt_logprobs" not in sampling(echo=True)
    assert options(echo=True).prompts == ("hello",)
    assert options(prompt=[1, 2], echo=True).prompts == (None,)
    assert options().prompts == ()
    assert not options(echo=True, logprobs=1).prompt_logprobs
    assert options(prompt_logprobs=1).prompt_logprobs


def test_values_that_equal_the_default_are_accepted() -> None:
    assert read(suffix="", best_of=1) == read()
    assert read(best_of=2, n=2) == read(n=2)


@settings(max_examples=100, deadline=None)
@given(body=BODIES, valid=BODIES.map(lambda body: {**body, **COMPLETION}), prompt=JSON)
def test_any_body_is_read_or_refused(body: Any, valid: Any, prompt: Any) -> None:
    for each in (body, valid, {**COMPLETION, "prompt": prompt}, {**COMPLETION, "prompt": ["a", prompt]}):
        error = outcome(read_completion, {"model": "m", **each}, lora=None)
        assert error is None or (error.status == 400 and error.message)
