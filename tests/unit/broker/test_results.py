"""Results and stream entries on the wire."""

import json
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_broker.errors import MalformedEntryError
from headrace_broker.packing import pack, pack_rows, unpack
from headrace_broker.results import ChoiceOutput, ErrorInfo, GenerateResult, TokenLogprob, Usage
from headrace_broker.streams.events import ChunkEvent, EndEvent, StartEvent, read_entry
from headrace_broker.streams.writer import StreamWrite, draws_of

TEXT = st.text(st.characters(codec="utf-8"), max_size=30)
COUNTS = st.integers(0, 2**31)
LOGPROBS = st.none() | st.lists(
    st.lists(st.builds(TokenLogprob, COUNTS, st.floats(-100, 0), st.integers(1, 9), TEXT), min_size=1, max_size=3),
    max_size=3,
)
USAGES = st.none() | st.builds(Usage, COUNTS, COUNTS, COUNTS)
ERRORS = st.none() | st.builds(ErrorInfo, st.sampled_from(["cancelled", "engine_error"]), TEXT)
OUTPUTS = st.builds(
    ChoiceOutput,
    index=st.integers(0, 63),
    text=TEXT,
    token_ids=st.lists(COUNTS, max_size=5),
    logprobs=LOGPROBS,
    finish_reason=st.none() | st.sampled_from(["stop", "length"]),
    stop_reason=st.none() | COUNTS | TEXT,
)
RESULTS = st.builds(GenerateResult, TEXT, st.lists(OUTPUTS, max_size=3), USAGES, ERRORS)


@given(RESULTS)
def test_a_result_survives_the_wire(result: GenerateResult) -> None:
    assert GenerateResult.from_wire(msgpack.unpackb(msgpack.packb(result.to_wire()))) == result


@given(st.integers(1, 9), COUNTS, OUTPUTS)
def test_a_chunk_survives_the_wire(attempt: int, offset: int, output: ChoiceOutput) -> None:
    write = StreamWrite.chunk(
        "r",
        attempt,
        offset,
        index=output.index,
        token_ids=output.token_ids,
        text=output.text,
        logprobs=output.logprobs,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
    )
    event = read_entry(f"{attempt}-{offset}".encode(), {b"type": write.type.encode(), b"data": write.data})
    assert event == ChunkEvent(
        entry_id=f"{attempt}-{offset}",
        attempt=attempt,
        offset=offset,
        index=output.index,
        token_ids=output.token_ids,
        text=output.text,
        logprobs=output.logprobs,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason if output.finish_reason else None,
    )


def test_the_id_of_an_end_entry_is_one_above_the_token_count() -> None:
    write = StreamWrite.end("r", 2, 30, finish_reason="error", error=ErrorInfo("engine_error", "it broke"))
    assert write.entry_id == "2-31"
    event = read_entry(b"2-31", {b"type": b"end", b"data": write.data})
    assert event == EndEvent("2-31", 2, 30, "error", None, ErrorInfo("engine_error", "it broke"))


def test_a_packing_error_leaves_no_bytes_in_the_next_entry() -> None:
    with pytest.raises(UnicodeEncodeError):
        pack({"text": "half of it, then \ud800"})
    assert msgpack.unpackb(pack({"text": "whole"})) == {"text": "whole"}


def test_a_start_entry_names_its_worker() -> None:
    assert read_entry(b"3-0", {b"type": b"start", b"data": pack({"worker": "w"})}) == StartEvent("3-0", 3, "w")


@pytest.mark.parametrize(("data", "draws"), [({"draws": "vllm-0.32-v2"}, "vllm-0.32-v2"), ({"draws": ["x"]}, None)])
def test_a_start_entry_names_the_draws_only_if_they_are_a_string(data: dict[str, object], draws: str | None) -> None:
    entry = read_entry(b"3-0", {b"type": b"start", b"data": pack({"worker": "w", **data})})
    assert entry == StartEvent("3-0", 3, "w", draws=draws)


def test_a_chunk_without_tokens_adds_no_draws() -> None:
    empty = ChunkEvent("2-1", 2, 1, 0, [], "the end of a text")
    entries = [StartEvent("1-0", 1, "w", draws="a"), ChunkEvent("1-1", 1, 1, 0, [7], "x")]
    assert draws_of([*entries, StartEvent("2-0", 2, "w", draws="b"), empty]) == {"a"}


CHUNK = {"index": 0, "token_ids": [1], "text": "t", "logprobs": None}


@pytest.mark.parametrize(
    ("entry_id", "fields"),
    [
        (b"nonsense", {b"type": b"start", b"data": pack({"worker": "w"})}),
        (b"1-0", {b"data": pack({"worker": "w"})}),
        (b"1-0", {b"type": b"start"}),
        (b"1-0", {b"type": b"start", b"data": b"\xc1"}),
        (b"1-0", {b"type": b"start", b"data": b""}),
        (b"1-0", {b"type": b"start", b"data": msgpack.packb([1])}),
        (b"1-0", {b"type": b"start", b"data": pack({})}),
        (b"1-1", {b"type": b"chunk", b"data": pack({"index": 0})}),
        *[
            (b"1-1", {b"type": b"chunk", b"data": pack({**CHUNK, name: wrong})})
            for name, wrong in {"index": None, "token_ids": None, "text": 7, "choice_tokens": "x"}.items()
        ],
        (b"1-1", {b"type": b"chunk", b"data": pack_rows({"first": "x", "count": 1, "bytes": b""})}),
        (b"1-1", {b"type": b"end", b"data": pack({"finish_reason": "stop", "usage": 3, "error": None})}),
        (b"1-1", {b"type": b"poem", b"data": pack({})}),
    ],
)
def test_a_malformed_entry_is_named(entry_id: bytes, fields: dict[bytes, bytes]) -> None:
    with pytest.raises(MalformedEntryError):
        read_entry(entry_id, fields)


@pytest.mark.parametrize(
    "wire",
    [
        {},
        {"request_id": "r", "outputs": 3, "usage": None, "error": None},
        {"request_id": "r", "outputs": [{}], "usage": None, "error": None},
        {"request_id": "r", "outputs": [], "usage": {"prompt_tokens": "x"}, "error": None},
        {"request_id": "r", "outputs": [], "usage": None, "error": {"code": 1}},
    ],
)
def test_a_malformed_result_is_named(wire: dict[str, Any]) -> None:
    with pytest.raises(MalformedEntryError, match="on the wire"):
        GenerateResult.from_wire(wire)


E_ACUTE = [TokenLogprob(5, -0.5, 1, "", b"\xc3"), TokenLogprob(6, -1.0, 2, "e")]
"""A token that ends inside a character, and another one."""


def test_bytes_that_are_not_text_are_sent_beside_the_candidates() -> None:
    logprobs, prompt_logprobs = [E_ACUTE, [TokenLogprob(7, -0.1, 1, "x")]], [None, E_ACUTE]
    output = ChoiceOutput(0, "x", [5, 7], logprobs)
    wire = msgpack.unpackb(msgpack.packb(GenerateResult("r", [output], prompt_logprobs=prompt_logprobs).to_wire()))
    assert wire["outputs"][0]["logprobs"] == [[[5, -0.5, 1, ""], [6, -1.0, 2, "e"]], [[7, -0.1, 1, "x"]]]
    assert wire["outputs"][0]["logprob_bytes"] == [[[0xC3], None], None]
    assert wire["prompt_logprob_bytes"] == [None, [[0xC3], None]]
    assert json.loads(json.dumps(wire)) == wire
    read = GenerateResult.from_wire(wire)
    assert read.outputs[0].logprobs is not None and read.prompt_logprobs is not None
    assert [[candidate.bytes for candidate in position] for position in read.outputs[0].logprobs] == [
        [b"\xc3", b"e"],
        [b"x"],
    ]
    assert [candidate.bytes for candidate in read.prompt_logprobs[1] or ()] == [b"\xc3", b"e"]


def test_a_chunk_has_the_bytes_of_its_candidates_too() -> None:
    write = StreamWrite.chunk(
        "r", 1, 1, index=0, token_ids=[5], text="", logprobs=[E_ACUTE], prompt_logprobs=[None, E_ACUTE]
    )
    event = read_entry(b"1-1", {b"type": b"chunk", b"data": write.data})
    assert isinstance(event, ChunkEvent) and event.logprobs is not None and event.prompt_logprobs is not None
    assert [candidate.bytes for candidate in event.logprobs[0]] == [b"\xc3", b"e"]
    assert [candidate.bytes for candidate in event.prompt_logprobs[1] or ()] == [b"\xc3", b"e"]


def test_no_bytes_are_sent_if_all_equal_their_texts() -> None:
    logprobs = [[TokenLogprob(7, -0.1, 1, "é")], [TokenLogprob(8, -0.1, 1, None)]]
    write = StreamWrite.chunk("r", 1, 2, index=0, token_ids=[7, 8], text="é", logprobs=logprobs)
    assert "logprob_bytes" not in unpack(write.data)
    assert "logprob_bytes" not in ChoiceOutput(0, "é", [7, 8], logprobs).to_wire()
    assert [position[0].bytes for position in logprobs] == ["é".encode(), None]
    token_id, logprob, rank, text = logprobs[0][0]
    assert (token_id, logprob, rank, text) == (7, -0.1, 1, "é")


@pytest.mark.parametrize("own_bytes", [[], [[[0xC3]], None, None], [[[300]]], [[5]], [["x"]], 7])
def test_bytes_that_do_not_match_their_candidates_are_refused(own_bytes: Any) -> None:
    data = {"index": 0, "token_ids": [5], "text": "", "logprobs": [[[5, -0.5, 1, ""], [6, -1.0, 2, "e"]]]}
    with pytest.raises(MalformedEntryError):
        read_entry(b"1-1", {b"type": b"chunk", b"data": pack(data | {"logprob_bytes": own_bytes or [[1, 2, 3]]})})


def test_no_repr_shows_generated_text() -> None:
    secret = "generated secret"
    output = ChoiceOutput(0, secret, [1], [[TokenLogprob(1, -0.1, 1, secret)]], "stop", secret)
    write = StreamWrite.chunk("r", 1, 1, index=0, token_ids=[1], text=secret)
    event = read_entry(b"1-1", {b"type": b"chunk", b"data": write.data})
    assert secret not in repr(output) + repr(GenerateResult("r", [output])) + repr(write) + repr(event)
