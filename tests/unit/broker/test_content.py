"""Bodies in JSON and msgpack, and messages of both Celery protocols."""

import base64
import json
import math
from typing import Any

import msgpack
import pytest

from headrace_broker.content import (
    JSON,
    MSGPACK,
    answer_type,
    dumps_result,
    loads,
    loads_stored,
    require_accepted,
    shown_encoding,
    shown_type,
)
from headrace_broker.errors import MalformedMessageError
from headrace_broker.queue.dead_letters import DeadLetter
from headrace_broker.queue.message_envelope import open_envelope


def envelope(said: Any, *, content_type: str = JSON, headers: Any = None, **changes: Any) -> bytes:
    packed = msgpack.packb(said) if content_type == MSGPACK else json.dumps(said).encode()
    message = {
        "body": base64.b64encode(packed).decode(),
        "content-type": content_type,
        "content-encoding": "utf-8",
        "headers": headers or {},
        "properties": {"body_encoding": "base64", "delivery_info": {}},
    }
    return json.dumps(message | changes).encode()


def body_of(opened: dict[str, Any]) -> Any:
    body = opened["body"]
    raw = base64.b64decode(body) if opened["properties"]["body_encoding"] == "base64" else body
    return loads(raw, opened["content-type"])


@pytest.mark.parametrize(
    "content_type", ["application/x-python-serialize", "application/x-yaml", "text/plain", "application/data", None, 5]
)
def test_another_content_type_is_refused_and_the_accepted_ones_named(content_type: Any) -> None:
    with pytest.raises(MalformedMessageError, match="application/json and application/x-msgpack"):
        loads(b"{}", content_type)


def test_the_refusal_names_the_content_type_but_quotes_no_other_text() -> None:
    with pytest.raises(MalformedMessageError, match="is application/x-yaml;"):
        loads(b"", "application/x-yaml")
    with pytest.raises(MalformedMessageError, match="is unreadable;"):
        loads(b"", "my prompt is: hello")


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"\x93", MSGPACK),
        (b"\xc1", MSGPACK),
        (b"{}", MSGPACK),
        (b"\x80", JSON),
        (b"secret", JSON),
        (b'{"secret": ', JSON),
        (b"[" * 100_000, JSON),
        (b"1" * 5000, JSON),
        (b"", JSON),
    ],
)
def test_a_body_that_is_not_of_its_content_type_is_refused_without_its_text(body: bytes, content_type: str) -> None:
    if body == b"{}":
        body = b"\x7b\x7d"  # two integers to msgpack: extra data
    with pytest.raises(MalformedMessageError, match=f"cannot be read as {content_type}") as caught:
        loads(body, content_type)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("kind", ["datetime", "uuid", "decimal", "bytes", "base64", "no such type"])
def test_typed_maps_of_kombu_stay_maps(kind: str) -> None:
    typed = {"__type__": kind, "__value__": "1e999999999"}
    assert loads(json.dumps([typed]).encode(), JSON) == [typed]


def test_json_keeps_large_integers_and_takes_the_last_of_two_equal_keys() -> None:
    assert loads(b'{"seed": 9007199254740993, "seed": 9223372036854775807}', JSON) == {"seed": 2**63 - 1}


def test_a_json_result_can_be_read_by_a_strict_parser() -> None:
    def strict(constant: str) -> Any:
        raise AssertionError(constant)

    text = dumps_result({"logprobs": [[[5, -math.inf, 1, "\ud83d\ud800"]], math.nan, math.inf, (1, 2)]}, JSON)
    assert json.loads(text, parse_constant=strict) == {
        "logprobs": [[[5, -9999.0, 1, "\ud83d\ud800"]], None, None, [1, 2]]
    }
    assert text.isascii()


def test_a_stored_result_of_either_content_type_is_read() -> None:
    meta = {"status": "SUCCESS", "result": {"text": "é"}}
    assert loads_stored(dumps_result(meta, JSON)) == loads_stored(dumps_result(meta, MSGPACK)) == meta


def test_a_message_of_another_content_type_is_answered_in_json() -> None:
    assert [answer_type(kind) for kind in (JSON, MSGPACK, "application/x-yaml", None, {})] == [
        JSON,
        MSGPACK,
        JSON,
        JSON,
        JSON,
    ]


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
def test_a_message_of_protocol_1_is_opened_as_one_of_protocol_2(content_type: str) -> None:
    kwargs = {"prompt": "x", "sampling_params": {"temperature": 0.5}}
    body = {
        "task": "headrace.generate",
        "id": "r1",
        "args": [],
        "kwargs": kwargs,
        "expires": "2030-01-01T00:00:00+00:00",
        "eta": None,
        "callbacks": [{"task": "x"}],
        "taskset": None,
        "utc": True,
    }
    raw = envelope(body, content_type=content_type, headers={"tenant": "acme"})
    opened = open_envelope(raw)
    assert opened["headers"] == {
        "tenant": "acme",
        "task": "headrace.generate",
        "id": "r1",
        "expires": "2030-01-01T00:00:00+00:00",
    }
    links = {"callbacks": [{"task": "x"}], "errbacks": None, "chord": None}
    assert body_of(opened) == [[], kwargs, links]
    letter = DeadLetter("delivery limit", "headrace.m", 5, raw)
    assert (letter.request_id, letter.content_type) == ("r1", content_type)


def test_numbers_of_a_protocol_1_body_keep_their_values() -> None:
    body = {"task": "headrace.generate", "id": "r1", "kwargs": {"n": 10**30, "t": math.nan, "u": -math.inf}}
    [_, kwargs, _] = body_of(open_envelope(envelope(body)))
    assert kwargs["n"] == 10**30
    assert math.isnan(kwargs["t"])
    assert kwargs["u"] == -math.inf


def test_a_body_of_protocol_1_is_decoded_up_to_64_kib() -> None:
    def raw(num_chars: int) -> bytes:
        body = json.dumps({"task": "headrace.generate", "id": "r1", "kwargs": {}})
        return envelope(None, body=body.ljust(num_chars), properties={"delivery_info": {}})

    assert open_envelope(raw(64 << 10))["headers"]["id"] == "r1"
    with pytest.raises(MalformedMessageError, match="larger than 64 KiB: use protocol 2"):
        open_envelope(raw((64 << 10) + 1))


def test_a_body_of_invalid_unicode_is_refused() -> None:
    with pytest.raises(MalformedMessageError, match="lone surrogates"):
        open_envelope(envelope(None, body="\ud800", headers={"id": "r"}, properties={"delivery_info": {}}))


@pytest.mark.parametrize("body", [5, [], {"task": "t"}, {"id": "x"}, {"task": 5, "id": "x"}, {"task": "t", "id": ""}])
def test_a_message_of_neither_protocol_is_left_unchanged(body: Any) -> None:
    opened = open_envelope(envelope(body))
    assert opened["headers"] == {}
    assert body_of(opened) == body


@pytest.mark.parametrize("body_encoding", [None, "utf-8"])
def test_a_json_body_may_be_plain_text_in_the_envelope(body_encoding: str | None) -> None:
    text = json.dumps([[], {"prompt": "é"}, {}], ensure_ascii=False)
    properties = {"delivery_info": {}, "body_encoding": body_encoding}
    opened = open_envelope(envelope(None, headers={"task": "t", "id": "r"}, body=text, properties=properties))
    assert body_of(opened) == [[], {"prompt": "é"}, {}]
    assert opened["properties"]["body_encoding"] is None  # kombu's only value for text


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"content-encoding": "zlib_codec"}, "content-encoding"),
        ({"content-encoding": None}, "content-encoding"),
        ({"properties": {"delivery_info": {}, "body_encoding": "rot13"}}, "body_encoding"),
        ({"properties": {"delivery_info": {}, "body_encoding": ["base64"]}}, "body_encoding"),
        ({"properties": {"delivery_info": 5}}, "delivery_info"),
        ({"headers": {"compression": "application/x-gzip"}}, "compressed"),
        ({"headers": [1]}, "headers"),
        ({"body": 5}, "body"),
    ],
)
def test_an_invalid_envelope_is_refused_and_its_field_named(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(MalformedMessageError, match=word):
        open_envelope(envelope([[], {}, {}], **{"headers": {"task": "t", "id": "r"}, **changes}))


def test_a_dead_letter_is_described_without_its_content() -> None:
    raw = envelope("my secret", content_type="application/x-yaml", headers={"id": "r"})
    letter = DeadLetter("rejected", "headrace.m", 1, raw)
    assert letter.described == f"{len(raw)} bytes, content-type application/x-yaml, content-encoding utf-8"
    assert letter.content_type == JSON
    assert DeadLetter("undecodable", "headrace.m", 1, b"[1]").described.startswith("3 bytes")


@pytest.mark.parametrize(
    "text", ["a secret", "Zanzibar", "text/a secret", ["application/json"], {"a": 1}, 5, "\ud800", "x" * 99]
)
def test_an_invalid_content_type_or_encoding_is_not_shown(text: object) -> None:
    assert (shown_type(text), shown_encoding(text)) == ("unreadable", "unreadable")
    with pytest.raises(MalformedMessageError, match="is unreadable;"):
        require_accepted(text)


def test_valid_content_types_and_encodings_are_shown() -> None:
    assert [shown_type(kind) for kind in ("application/x-yaml", "text/plain", None)] == [
        "application/x-yaml",
        "text/plain",
        "no content type",
    ]
    assert [shown_encoding(kind) for kind in ("binary", "UTF-16", None)] == ["binary", "utf-16", "no encoding"]
