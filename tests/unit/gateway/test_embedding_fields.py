"""The body of `POST /v1/embeddings` becomes the queue's arguments, and all its problems are reported together."""

from typing import Any

import pytest

from headrace_broker import RegisteredModel
from headrace_gateway.errors import ApiError
from headrace_gateway.pooling.embeddings import read_embeddings
from headrace_gateway.pooling.pooling_body import PoolingBody

MODEL = RegisteredModel("m", 64, 1.0, "w", tasks=("embed",), dimensions=4, max_input_tokens=64)


def read(**fields: Any) -> PoolingBody:
    return read_embeddings({"model": "m", **fields}, model=MODEL)


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    return caught.value


@pytest.mark.parametrize(
    ("given", "sent"),
    [("mill", "mill"), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_each_form_of_input_becomes_inputs_of_the_queue(given: Any, sent: Any) -> None:
    assert read(input=given).given == {"input": sent}


def test_null_counts_as_absent() -> None:
    body = read(input="a", dimensions=None, encoding_format=None, user=None, normalize=None, truncation_side=None)
    assert body.given == {"input": "a"}
    assert body.options == {"encoding_format": "float"}


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        ({"truncate_prompt_tokens": -1}, {"truncate": "end"}),
        ({"truncate_prompt_tokens": 7, "truncation_side": "left"}, {"truncate": "start", "max_tokens": 7}),
        (
            {"dimensions": 2, "normalize": False, "prompt": "q: "},
            {"dimensions": 2, "normalize": False, "prompt": "q: "},
        ),
    ],
)
def test_options_get_the_names_of_the_queue(fields: dict[str, Any], sent: dict[str, Any]) -> None:
    assert read(input="a", **fields).given == {"input": "a", **sent}


def test_special_tokens_are_not_asked_for_beside_token_ids() -> None:
    assert read(input=[1, 2], add_special_tokens=True).given == {"input": [[1, 2]]}


def test_all_problems_are_reported_at_once_with_their_indices() -> None:
    error = refusal(
        input=["a", "", "b", 3], encoding_format="hex", dimensions=0, images=["x"], truncate_prompt_tokens=0
    )
    for part in (
        "input[1] must not be empty",
        "input[3] must be text or a list of token ids, got 3",
        "encoding_format must be one of float, base64, got 'hex'",
        "dimensions must be at least 1",
        "images is not supported: only text is supported",
        "truncate_prompt_tokens must be -1",
    ):
        assert part in error.message
    assert error.status == 400


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], "input must hold 1 to 2048"),
        (["a"] * 2049, "got 2049"),
        (["a", [1]], "inputs of one kind"),
        ([{"text": "a"}], "input[0] must be"),
        ([[-1]], "input[0][0]"),
    ],
)
def test_a_wrong_input_is_refused(given: Any, told: str) -> None:
    assert told in refusal(input=given).message


def test_a_missing_input_is_refused() -> None:
    assert refusal().param == "input"
