"""The lines of a batch: which are refused with which code, and the format of an answer."""

import json
from dataclasses import replace
from typing import Any

import pytest

from headrace_broker.pooling_messages import PoolingRequest
from headrace_gateway import ApiError
from headrace_gateway.batch.line import MAX_LINE_BYTES, BatchLine, read_call, read_line
from headrace_gateway.pooling.pooling_body import PoolingBody
from headrace_gateway.requests.call import Call, ChatOptions, CompletionOptions
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
        ({"url": "/v2/embed"}, "invalid_url", "url"),
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
    chat, completion = read(), read(url="/v1/completions", body=COMPLETION)
    for line, options in ((chat, ChatOptions), (completion, CompletionOptions)):
        call = read_call(line.raw, model(), None)
        assert isinstance(call, Call)
        assert isinstance(call.options, options)
    with pytest.raises(ApiError, match="temperature"):
        read_call(read(body={**CHAT, "temperature": -1}).raw, model(), None)


POOLED: list[tuple[str, dict[str, Any], str, int]] = [
    ("/v1/embeddings", {"input": "mill"}, "embed", 1),
    ("/v1/embeddings", {"input": [5, 6, 7]}, "embed", 1),
    ("/v1/embeddings", {"input": [[5], [6, 7]]}, "embed", 2),
    ("/v1/rerank", {"query": "mill", "documents": ["river", "wheel", "dam"]}, "score", 3),
    ("/v1/score", {"text_1": "mill", "text_2": ["river", "wheel"]}, "score", 2),
    ("/v1/score", {"queries": ["mill", "dam"], "items": ["river", "wheel"]}, "score", 2),
    ("/v1/classify", {"input": ["mill", "river"]}, "classify", 2),
]


@pytest.mark.parametrize(("url", "body", "task", "num_inputs"), POOLED)
def test_a_pooling_line_knows_its_task_and_counts_its_inputs(
    url: str, body: dict[str, Any], task: str, num_inputs: int
) -> None:
    line = read(url=url, body={"model": "m", **body})
    assert (line.task, line.num_inputs) == (task, num_inputs)
    call = read_call(line.raw, model(), None)
    assert isinstance(call, PoolingBody)
    assert call.task == task
    assert len(PoolingRequest.parse(call.task, call.given, is_call=True).inputs) == num_inputs
    assert (read().task, read().num_inputs) == ("generate", 0)


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        ("/v1/embeddings", {"input": ["mill", ""]}, "input[1]"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": 5}, "input"),
        ("/v1/classify", {}, "input"),
        ("/v1/rerank", {"query": "mill", "documents": "river"}, "documents"),
        ("/v1/rerank", {"query": "mill", "texts": ["river"]}, "body.texts"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
    ],
)
def test_a_wrong_pooling_line_is_refused_as_its_endpoint_refuses_it(url: str, body: dict[str, Any], param: str) -> None:
    line = read(url=url, body={"model": "m", **body})
    with pytest.raises(ApiError) as refused:
        read_call(line.raw, model(), None)
    assert refused.value.param == param


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
