"""The lines of a batch: which are refused with which code, and the format of an answer."""

import json
from dataclasses import replace
from typing import Any

import pytest

from headrace_gateway import ApiError
from headrace_gateway.batch.line import ENDPOINTS, MAX_LINE_BYTES, BatchLine, read_call, read_line
from headrace_gateway.requests.call import ChatOptions, CompletionOptions
from unit.gateway.bodies import CHAT, COMPLETION, model

LINE: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}


def read(**changes: Any) -> BatchLine:
    return read_line(json.dumps({**LINE, **changes}).encode())


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"custom_id": ""}, "invalid_custom_id", "custom_id"),
        ({"custom_id": 5}, "invalid_custom_id", "custom_id"),
        ({"custom_id": "x" * 513}, "invalid_custom_id", "custom_id"),
        ({"method": "GET"}, "invalid_method", "method"),
        ({"url": "/v1/embeddings"}, "invalid_url", "url"),
        ({"url": ["/v1/completions"]}, "invalid_url", "url"),
        ({"body": "text"}, "invalid_request", "body"),
        ({"body": {**CHAT, "stream": True}}, "invalid_request", "body.stream"),
        ({"priority": 3}, "unsupported_parameter", "priority"),
    ],
)
def test_a_wrong_line_is_refused_by_name(changes: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        read(**changes)
    assert (refused.value.code, refused.value.param) == (code, param)


@pytest.mark.parametrize("raw", [b"{", b"[]", b'"a"', b'{"a": NaN}', b'{"a": "\xff"}', b"[" * 100_000])
def test_a_line_that_is_not_a_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        read_line(raw)
    assert refused.value.code == "invalid_json_line"


def test_a_line_over_the_maximum_length_is_refused() -> None:
    with pytest.raises(ApiError, match=f"at most {MAX_LINE_BYTES} bytes"):
        read_line(b" " * (MAX_LINE_BYTES + 1))


def test_a_body_is_read_as_its_endpoint_reads_it() -> None:
    assert isinstance(read_call(read().raw, model(), None).options, ChatOptions)
    completion = read(url="/v1/completions", body=COMPLETION)
    assert isinstance(read_call(completion.raw, model(), None).options, CompletionOptions)
    with pytest.raises(ApiError, match="temperature"):
        read_call(read(body={**CHAT, "temperature": -1}).raw, model(), None)
    assert set(ENDPOINTS) == {"/v1/chat/completions", "/v1/completions", "/v1/responses"}


def test_a_line_far_larger_than_the_context_of_its_model_is_refused() -> None:
    line = read(url="/v1/completions", body={**COMPLETION, "prompt": ["x", "y" * 600_000]})
    with pytest.raises(ApiError, match=r"at most 268544 bytes.* 100 tokens") as refused:
        read_call(line.raw, model(), None)
    assert refused.value.code == "context_length_exceeded"
    read_call(line.raw, replace(model(), max_model_len=9000), None)


def test_the_id_of_an_answer_names_one_request() -> None:
    lines = [read(), read(custom_id="b"), read(body={**CHAT, "seed": 1}), read(url="/v1/completions")]
    assert len({line.id for line in lines}) == 4
    assert read().id == lines[0].id


def test_an_answer_is_one_line_whatever_it_says() -> None:
    line = read(custom_id="ä\n\u2028").answered(200, "chatcmpl-1", {"text": "a\nb\r\u2028c"})
    assert line.count(b"\n") == 1
    assert json.loads(line) == {
        "id": read(custom_id="ä\n\u2028").id,
        "custom_id": "ä\n\u2028",
        "response": {"status_code": 200, "request_id": "chatcmpl-1", "body": {"text": "a\nb\r\u2028c"}},
        "error": None,
    }


def test_a_request_without_an_answer_says_why() -> None:
    line = json.loads(read().unanswered("answer_lost", "it is gone"))
    assert (line["response"], line["error"]) == (None, {"code": "answer_lost", "message": "it is gone"})
