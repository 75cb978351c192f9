from typing import Any

import msgpack
import pytest

from headrace_broker.errors import MalformedEntryError
from headrace_broker.streams.events import StartEvent, read_entry
from headrace_wire.wire_number import SERVED, WIRE_NUMBER, wire_problem


def entry_of(**changes: Any) -> dict[bytes, bytes]:
    return {b"type": b"start", b"data": msgpack.packb({"worker": "w", **changes})}


def test_a_version_reads_its_own_number_and_at_most_the_one_before() -> None:
    assert WIRE_NUMBER in SERVED
    assert set(SERVED) <= {WIRE_NUMBER, WIRE_NUMBER - 1} - {0}
    assert [wire_problem(number) for number in (None, *SERVED)] == [None] * (1 + len(SERVED))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (WIRE_NUMBER + 1, "upgrade the reader"),
        (2**70, "upgrade the reader"),
        (0, "an integer from 1, got 0"),
        (-1, "an integer from 1, got -1"),
        (True, "an integer from 1, got true"),
        (1.0, "an integer from 1, got 1.0"),
        ("1", "an integer from 1, got a string of length 1"),
        ([], "an integer from 1, got a list"),
    ],
)
def test_any_other_number_is_refused_with_what_to_do(value: object, said: str) -> None:
    problem = wire_problem(value)
    assert problem is not None
    assert said in problem


def test_a_reader_refuses_the_stream_of_a_format_that_it_does_not_know() -> None:
    assert isinstance(read_entry(b"1-0", entry_of()), StartEvent)
    assert isinstance(read_entry(b"1-0", entry_of(wire=WIRE_NUMBER)), StartEvent)
    with pytest.raises(
        MalformedEntryError, match=f"format {WIRE_NUMBER + 1}.* reads {WIRE_NUMBER}: upgrade the reader"
    ):
        read_entry(b"1-0", entry_of(wire=WIRE_NUMBER + 1))
