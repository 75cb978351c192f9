"""Calls of pooling tasks: their messages, the join of their answers, and what the wire carries."""

from __future__ import annotations

import json
import struct
from typing import Any

import msgpack
import numpy as np
import pytest

from headrace_broker.client.pooling_calls import MESSAGE_INPUTS, MESSAGE_TOKENS, PoolingCall, pooling_call, score_call
from headrace_broker.content import JSON, MSGPACK, dumps_result, loads
from headrace_broker.errors import InvalidRequestError, MalformedEntryError, StreamExpiredError
from headrace_broker.pooling_messages import PoolingRequest
from headrace_broker.pooling_results import (
    Matrix,
    PoolingResult,
    RankedDocument,
    matrix_of,
    ranking_of,
    recorded_pooling_result,
    recorded_rows,
)
from headrace_broker.results import ErrorInfo, RequestFailedError, Usage
from headrace_broker.streams.events import EndEvent, RowsEvent, StartEvent, read_entry
from headrace_broker.streams.writer import StreamWrite


def floats(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def embed(inputs: Any, **options: Any) -> PoolingCall:
    return pooling_call("embed", {"input": inputs}, options, "minilm")


def sizes(call: PoolingCall) -> list[int]:
    requests = [submission.request for submission in call.submissions]
    return [len(request.inputs) for request in requests if isinstance(request, PoolingRequest)]


@pytest.mark.parametrize(
    ("task", "kwargs", "inputs"),
    [
        ("embed", {"input": "river", "dimensions": 3, "model": None}, ["river"]),
        ("embed", {"input": np.array([[1, 2], [3, 4]])}, [[1, 2], [3, 4]]),
        ("embed", {"input": [np.array([1, 2])]}, [[1, 2]]),
        ("score", {"query": "q", "documents": ["a", "b"]}, [("q", "a"), ("q", "b")]),
        ("score", {"queries": ["q"], "documents": ["a", "b"]}, [("q", "a"), ("q", "b")]),
        ("score", {"queries": ["p", "q"], "documents": ["a", "b"]}, [("p", "a"), ("q", "b")]),
        ("classify", {"input": ["x", ["a", "b"]], "activation": False}, ["x", ("a", "b")]),
    ],
)
def test_a_request_survives_the_wire_and_names_its_inputs(task: Any, kwargs: Any, inputs: list[Any]) -> None:
    request = PoolingRequest.parse(task, kwargs)
    assert request.inputs == inputs
    assert PoolingRequest.parse(task, msgpack.unpackb(msgpack.packb(request.to_kwargs()))) == request
    assert "river" not in repr(request)


def test_a_large_call_becomes_several_messages() -> None:
    assert sizes(embed(["x"] * 600)) == [MESSAGE_INPUTS, MESSAGE_INPUTS, 88]
    half = "y" * (4 * MESSAGE_TOKENS // 2)
    assert sizes(embed([half, half, "z", half])) == [2, 2]
    assert sizes(embed(["small", half * 4, "small"])) == [1, 1, 1]
    assert sizes(embed([[7] * 9000, [7] * 9000])) == [1, 1]
    assert sizes(embed(["x"] * 5000)) == [MESSAGE_INPUTS] * 19 + [136]


def test_a_large_call_of_pairs_keeps_each_query_with_its_document() -> None:
    documents = [f"d{number}" for number in range(300)]
    for queries, expected in (("q", "q"), (["q"], "q"), ([f"q{number}" for number in range(300)], "q299")):
        call = score_call(queries, documents, {}, "minilm")
        assert sizes(call) == [256, 44]
        last = call.submissions[-1].request
        assert isinstance(last, PoolingRequest)
        assert last.inputs[-1] == (expected, "d299")


def test_the_messages_of_a_call_have_different_idempotency_keys_and_ids() -> None:
    keys = [submission.headers["idempotency_key"] for submission in embed(["x"] * 300, idempotency_key="k").submissions]
    assert keys == ["k:0", "k:1"]
    [only] = embed(["x"], idempotency_key="k", request_id="r1").submissions
    assert (only.headers["idempotency_key"], only.request_id) == ("k", "r1")
    many = embed(["x"] * 600, request_id="r1").submissions
    assert [each.request_id for each in many] == ["r1", "r1.1", "r1.2"]
    assert all(each.has_given_id for each in many)
    assert len({each.request_id for each in embed(["x"] * 600).submissions}) == 3
    with pytest.raises(InvalidRequestError, match="request_id must be 1 to 128 of the characters"):
        embed(["x"] * 300, request_id="r" * 127)


def test_all_problems_of_a_call_are_named_at_once_with_the_indices_of_the_call() -> None:
    inputs: list[Any] = ["x"] * 5000
    inputs[4000] = ""
    with pytest.raises(InvalidRequestError) as refused:
        embed(inputs, top_k=3, dimensions=0, priority=10)
    assert list(refused.value.problems) == [
        "unknown key 'top_k': the answer has the scores of all documents: sort them, or use Client.rerank",
        "input[4000] must not be empty",
        "dimensions must be at least 1 and at most 2147483647, got 0",
        "priority must be an integer from 0 (first) to 9, got 10",
    ]


def rows_event(first: int, *numbers: float, count: int = 1) -> RowsEvent:
    return RowsEvent(f"1-{first + count}", 1, first, count, floats(*numbers))


def ended(tokens: int, **more: Any) -> EndEvent:
    return EndEvent(f"1-{tokens + 1}", 1, tokens, "stop", Usage(10, 0, 0), **more)


def test_an_answer_joins_its_messages_in_the_order_of_the_inputs() -> None:
    call = embed([[7] * 9000, [8] * 9000, [9]])
    answer = call.answer(["a", "b"])
    answer.add("b", StartEvent("1-0", 1, "w"))
    answer.add("b", rows_event(0, 5, 6))
    answer.add("a", rows_event(0, 1, 2))
    answer.add("b", rows_event(1, 7, 8))
    answer.add("b", ended(2, truncated=(1,)))
    answer.add("a", ended(1, truncated=(0,)))
    pooled = answer.whole()
    assert pooled.rows.tolist() == [[1.0, 2.0], [5.0, 6.0], [7.0, 8.0]]
    assert (pooled.truncated, pooled.usage, pooled.request_ids) == ([0, 2], Usage(20, 0, 0), ["a", "b"])


def test_a_failed_message_fails_the_call_with_its_rows() -> None:
    answer = embed(["x", "y"]).answer(["a"])
    answer.add("a", rows_event(0, 1, 2))
    with pytest.raises(RequestFailedError, match="no finite embedding") as failed:
        answer.add("a", ended(1, error=ErrorInfo("engine_error", "input[1] has no finite embedding")))
    assert failed.value.result.rows.tolist() == [[1.0, 2.0]]
    with pytest.raises(StreamExpiredError):
        answer.add("a", StreamExpiredError("a", "1-0"))


def test_rows_travel_as_raw_bytes_in_the_stream() -> None:
    data = bytes(range(256)) * 4
    write = StreamWrite.rows("r", 3, 5, 2, data)
    assert (write.entry_id, write.entry_before, write.type) == ("3-7", "3-5", "chunk")
    event = read_entry(write.entry_id.encode(), {b"type": b"chunk", b"data": write.data})
    assert event == RowsEvent("3-7", 3, 5, 2, data)
    end = StreamWrite.end("r", 3, 7, finish_reason="stop", truncated=[1], labels=["no", "yes"])
    read = read_entry(end.entry_id.encode(), {b"type": b"end", b"data": end.data})
    assert isinstance(read, EndEvent)
    assert (read.truncated, read.labels, read.tokens) == ((1,), ("no", "yes"), 7)


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
def test_a_result_has_raw_float32_in_msgpack_and_base64_in_json(content_type: str) -> None:
    result = PoolingResult("r", Matrix(floats(1.5, -2.0), (1, 2)), ["a", "b"], [0], Usage(3, 0, 0))
    stored = loads(dumps_result(result.to_wire(), content_type), content_type)
    assert stored["data"]["bytes"] == (b"\x00\x00\xc0?\x00\x00\x00\xc0" if content_type == MSGPACK else "AADAPwAAAMA=")
    assert (stored["data"]["dtype"], stored["data"]["shape"]) == ("float32", [1, 2])
    assert (stored["labels"], stored["truncated"], stored["error"]) == (["a", "b"], [0], None)
    assert stored["usage"] == {"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 0}


def test_only_bytes_become_base64() -> None:
    with pytest.raises(TypeError, match="a value of type set"):
        dumps_result({"x": set()}, JSON)
    assert json.loads(dumps_result({"x": [float("-inf"), b"\x00"]}, JSON)) == {"x": [-9999.0, "AA=="]}


def test_a_matrix_is_an_array_of_numpy_and_lists() -> None:
    matrix = Matrix(floats(1, 2, 3, 4), (2, 2))
    array = np.asarray(matrix)
    assert (array.dtype, array.tolist(), len(matrix)) == (np.dtype("<f4"), matrix.tolist(), 2)
    assert matrix.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert matrix_of("score", 2, floats(1, 2)).tolist() == [1.0, 2.0]
    assert matrix_of("classify", 2, floats(1, 2)).tolist() == [[1.0], [2.0]]


def test_a_result_is_read_from_the_stream() -> None:
    entries = [rows_event(0, 1, 2), StartEvent("2-0", 2, "w"), rows_event(1, 3, 4)]
    result = recorded_pooling_result("r", "embed", entries, ended(2, truncated=(1,)))
    assert result.rows is not None
    assert (result.rows.tolist(), result.truncated) == ([[1.0, 2.0], [3.0, 4.0]], (1,))
    assert recorded_pooling_result("r", "embed", [], ended(0)).rows is None
    for wrong in ([rows_event(1, 1)], [rows_event(0, 1), rows_event(0, 1)], [rows_event(0, count=0)]):
        with pytest.raises(MalformedEntryError):
            recorded_rows(wrong)


def test_documents_are_ranked_by_score_and_then_by_index() -> None:
    assert ranking_of([0.5, 2.0, 0.5, 1.0], None) == [
        RankedDocument(1, 2.0), RankedDocument(3, 1.0), RankedDocument(0, 0.5), RankedDocument(2, 0.5)
    ]  # fmt: skip
    assert [found.index for found in ranking_of([0.5, 2.0, 0.5], 2)] == [1, 0]
    assert len(ranking_of([1.0], 0)) == 1
