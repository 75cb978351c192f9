"""Lines of JSON whose texts hold what some readers take for the end of a line."""

import json
from typing import Any

import pytest

from headrace_gateway.answers.event_stream import DataEncoder, ResponseEncoder, named_event
from headrace_gateway.answers.reader import Cursor
from headrace_gateway.batch.line import BatchLine
from headrace_gateway.http.json import encode_line

TEXT = "".join(map(chr, range(0x20))) + "a\x7f\x85b\u2028c\u2029é\U0001f600"


@pytest.mark.parametrize("value", [TEXT, {TEXT: [TEXT, 1]}, "é", "", None])
def test_a_value_is_one_line_for_every_reader_and_comes_back_the_same(value: Any) -> None:
    encoded = encode_line(value)
    assert len(encoded.decode().splitlines()) == len(encoded.splitlines()) == 1
    assert json.loads(encoded) == value


def test_other_characters_are_sent_as_they_are() -> None:
    assert encode_line("é😀") == '"é😀"'.encode()


def test_a_line_of_a_batch_has_one_end() -> None:
    line = BatchLine(TEXT, "/v1/completions", "m", "batch_req_1", b"{}").answered(200, "cmpl-1", {"text": TEXT})
    assert line.endswith(b"\n")
    assert len(line.decode().splitlines()) == 1


def test_an_event_has_the_lines_of_its_fields_alone() -> None:
    chunk = {"type": "x", "sequence_number": 0, "delta": TEXT}
    for event, fields in (
        (DataEncoder("id").event(chunk, Cursor(0, 0, 0)), ["id", "data"]),
        (ResponseEncoder().event(chunk, Cursor(0, 0, 0)), ["event", "data"]),
        (named_event(chunk), ["event", "data"]),
    ):
        assert [line.partition(":")[0] for line in event.decode().rstrip("\n").splitlines()] == fields
