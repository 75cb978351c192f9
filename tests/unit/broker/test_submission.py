"""The checks of a client before it submits, and its decoding of replies."""

import uuid
from datetime import UTC, datetime
from typing import Any

import msgpack
import pytest

from headrace_broker.client.submission import (
    RequestStatus,
    Submission,
    SubmitRequest,
    cancel_call,
    prepare,
    prepare_all,
    read_result,
    read_status,
    request_of,
    was_cancelled,
)
from headrace_broker.errors import InvalidRequestError, MalformedEntryError
from headrace_broker.messages import GenerateRequest
from headrace_broker.packing import pack
from headrace_broker.results import ChoiceOutput, ErrorInfo, GenerateResult, RequestFailedError, Usage
from headrace_wire.chat import CHAT_OPTIONS
from headrace_wire.request import REQUEST_KEYS
from headrace_wire.wire_number import WIRE_NUMBER

NOW = 1_800_000_000.0


def prepared(**options: Any) -> Submission:
    return prepare({"prompt": "x", "model": "m", **options}, default_model=None, now=lambda: NOW)  # type: ignore[typeddict-item]


def problems_of(**options: Any) -> tuple[str, ...]:
    with pytest.raises(InvalidRequestError) as refusal:
        prepared(**options)
    return refusal.value.problems


def test_a_submission_has_the_headers_that_the_queue_uses() -> None:
    submission = prepared(priority=9, tenant="t", idempotency_key="k", request_id="r", expires=60, abandon_after=30)
    assert (submission.model, submission.request_id, submission.priority) == ("m", "r", 9)
    prefix = submission.headers["prefix"]
    used_headers = {"prefix": prefix, "tenant": "t", "idempotency_key": "k", "abandon_after": 30}
    assert submission.headers == {"wire": WIRE_NUMBER, "enqueued_at": NOW, **used_headers}
    assert submission.expires == datetime.fromtimestamp(NOW + 60, UTC)


def test_absent_options_are_not_sent_and_each_request_gets_its_own_id() -> None:
    first, second = prepared(), prepared()
    assert first.headers.keys() == {"wire", "enqueued_at", "prefix"}
    assert first.expires is None
    assert first.request_id != second.request_id
    assert len(first.request_id) == 32


@pytest.mark.parametrize(("given", "text"), [(0, "0"), (uuid.UUID(int=7), str(uuid.UUID(int=7))), ("a", "a")])
def test_a_request_id_may_be_a_number_or_a_uuid(given: Any, text: str) -> None:
    submission = prepared(request_id=given)
    assert (submission.request_id, submission.has_given_id) == (text, True)


@pytest.mark.parametrize(
    "given", ["", True, 1.5, b"a", ["a"], 10**5000, "\ud800"], ids=lambda given: type(given).__name__
)
def test_an_invalid_request_id_is_refused(given: Any) -> None:
    assert "request_id must be 1 to 128 of the characters" in problems_of(request_id=given)[0]


@pytest.mark.parametrize("given", ["", 0, True, b"m", ["m"], 10**5000], ids=lambda _: "")
def test_an_invalid_model_name_is_refused(given: Any) -> None:
    assert "model must be a printable string" in "".join(problems_of(model=given))


def test_content_in_parts_has_the_same_prefix_and_other_tools_another() -> None:
    whole = prepared(**chat("Be brief.", "hi"))
    parts: Any = [{"role": "system", "content": ["Be brief."]}, {"role": "user", "content": "ho"}]
    in_parts = prepared(prompt=None, messages=parts)
    with_tools = prepared(prompt=None, messages=parts, tools=[{"a": 1}])
    assert whole.headers["prefix"] == in_parts.headers["prefix"] != with_tools.headers["prefix"]
    assert with_tools.request.tools == [{"a": 1}]


def chat(*contents: str) -> dict[str, Any]:
    roles = ["system", "user", "assistant", "user"]
    return {"prompt": None, "messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"prompt": "a" * 256 + "b"}, {"prompt": "a" * 256 + "c"}, True),
        ({"prompt": "ab"}, {"prompt": "ac"}, False),
        ({"prompt": "a"}, {"prompt": "a", "lora": "sql"}, False),
        ({"prompt": "a"}, {"prompt": "a", "model": "other"}, False),
        (chat("s" * 999, "u"), chat("s" * 999, "v", "w"), True),
        (chat("s" * 999 + "t"), chat("s" * 999), False),
        ({"prompt": None, "prompt_token_ids": [1] * 65}, {"prompt": None, "prompt_token_ids": [1] * 64 + [2]}, True),
        ({"prompt": None, "prompt_token_ids": [1]}, {"prompt": None, "prompt_token_ids": [2]}, False),
    ],
)
def test_prompts_with_the_same_beginning_have_the_same_prefix_hash(
    one: dict[str, Any], other: dict[str, Any], same: bool
) -> None:
    first, second = (prepared(**options).headers["prefix"] for options in (one, other))
    assert (first == second) == same
    assert len(first) == 16
    assert int(first, 16) >= 0


def test_a_deadline_may_be_a_datetime() -> None:
    moment = datetime.fromtimestamp(NOW + 5, UTC)
    assert prepared(expires=moment).expires == moment


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"model": None}, "model must be given"),
        ({"model": "a\nb"}, "model must be a printable string"),
        ({"priority": 10}, "priority must be an integer from 0 (first) to 9, got 10"),
        ({"priority": True}, "priority must be"),
        ({"request_id": "a b"}, "request_id must be"),
        ({"request_id": "a\n"}, "request_id must be"),
        ({"tenant": ""}, "tenant must be"),
        ({"idempotency_key": 5}, "idempotency_key must be"),
        ({"expires": 0}, "within the next 365 days"),
        ({"expires": float("nan")}, "expires must be seconds"),
        ({"expires": 1e9}, "within the next 365 days"),
        ({"expires": datetime(2027, 1, 1)}, "naive datetime"),
        ({"expires": datetime(2000, 1, 1, tzinfo=UTC)}, "within the next 365 days"),
        ({"expires": "soon"}, "expires must be seconds"),
        ({"abandon_after": 0.5}, "abandon_after must be a number of seconds from 1 to 3600, got 0.5"),
        ({"abandon_after": 3601}, "got 3601"),
        ({"abandon_after": "30"}, "got a string of length 2"),
        ({"abandon_after": 10**400}, "abandon_after must be a number of seconds from 1 to 3600"),
        ({"expires": 10**400}, "expires must be seconds"),
        ({"sampling_params": {"temperature": 10**400}}, "temperature must be"),
        ({"lora": "/x"}, "lora must be 1 to 128 of the characters"),
        ({"loras": "x"}, "unknown option 'loras'"),
        ({"messages": []}, "exactly one of"),
    ],
)
def test_a_bad_option_is_refused_by_name(options: dict[str, Any], complaint: str) -> None:
    assert complaint in "; ".join(problems_of(**options))


def test_all_bad_options_are_reported_at_once() -> None:
    assert len(problems_of(prompt=5, model=None, priority=-1, request_id="?", tenant="", expires=-1)) == 6


def test_many_requests_are_refused_together_with_their_positions() -> None:
    many: list[SubmitRequest] = [{"prompt": "x"}, {}, {"messages": []}]
    with pytest.raises(InvalidRequestError) as refusal:
        prepare_all(many, default_model="m")
    assert [problem.partition(":")[0] for problem in refusal.value.problems] == ["request 1", "request 2"]
    assert [submission.model for submission in prepare_all(many[:1], default_model="m")] == ["m"]


def test_an_earlier_cancellation_counts_too() -> None:
    assert was_cancelled(None)
    assert was_cancelled(cancel_call("r", 60)["args"][0])
    assert not was_cancelled(pack({"finish_reason": "stop"}))


def test_a_status_is_read() -> None:
    assert read_status(None) == RequestStatus("pending")
    assert read_status([2, 7, b"chunk", pack({"token_ids": [1]})]) == RequestStatus("running", 2, 7)
    assert read_status([2, 7, b"end", pack({"finish_reason": "stop"})]) == RequestStatus("finished", 2, 7, "stop")
    assert read_status([1, 7, b"chunk", pack({"first": 4, "bytes": b""})]) == RequestStatus("running", 1, rows=7)
    ended = pack({"finish_reason": "stop", "truncated": []})
    assert read_status([1, 7, b"end", ended]) == RequestStatus("finished", 1, finish_reason="stop", rows=7)


def stored(status: str, result: Any) -> bytes:
    packed: bytes = msgpack.packb({"status": status, "result": result, "traceback": None, "task_id": "r"})
    return packed


RESULT = GenerateResult("r", [ChoiceOutput(0, "hi", [1], finish_reason="stop")], Usage(1, 0, 1))


def test_a_stored_result_is_read() -> None:
    assert read_result("r", stored("SUCCESS", RESULT.to_wire())) == RESULT
    assert read_result("r", stored("STARTED", None)) is None


def test_a_result_with_an_error_is_raised_with_its_partial_output() -> None:
    partial = GenerateResult("r", RESULT.outputs, None, ErrorInfo("cancelled", "the client cancelled the request"))
    with pytest.raises(RequestFailedError) as failure:
        read_result("r", stored("SUCCESS", partial.to_wire()))
    assert (failure.value.code, failure.value.result) == ("cancelled", partial)


@pytest.mark.parametrize(
    ("status", "result", "code"),
    [
        ("FAILURE", {"exc_type": "RuntimeError", "exc_message": ["boom"]}, "engine_error"),
        ("FAILURE", None, "engine_error"),
        ("REVOKED", {"exc_type": "TaskRevokedError", "exc_message": ["revoked"]}, "cancelled"),
        ("REVOKED", {"exc_type": "TaskRevokedError", "exc_message": ["expired"]}, "expired"),
    ],
)
def test_celerys_own_failures_get_a_code(status: str, result: Any, code: str) -> None:
    with pytest.raises(RequestFailedError) as failure:
        read_result("r", stored(status, result))
    assert failure.value.code == code


def test_a_malformed_result_is_named() -> None:
    with pytest.raises(MalformedEntryError):
        read_result("r", stored("SUCCESS", 5))


OPTIONS: dict[str, Any] = {
    "prompt": "x",
    "sampling_params": {"max_tokens": 3},
    "messages": [{"role": "user", "content": "x"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "chat_template_kwargs": {"a": 1},
    "add_generation_prompt": False,
    "continue_final_message": True,
    "prompt_token_ids": [1],
    "model": "m",
    "lora": "a",
    "priority": 3,
    "expires": 60,
    "due": 60,
    "tenant": "t",
    "key_name": "web",
    "prefix_key": "k",
    "cache_salt": "s",
    "abandon_after": 30,
    "idempotency_key": "i",
    "request_id": "r",
}


def test_what_a_submission_adds_is_not_sent_as_an_argument_that_the_worker_does_not_know() -> None:
    assert OPTIONS.keys() == SubmitRequest.__annotations__.keys() - {"request"}
    for content in ("prompt", "prompt_token_ids", "messages"):
        chosen = {content, "sampling_params"} | (set(CHAT_OPTIONS) if content == "messages" else set())
        options = {name: value for name, value in OPTIONS.items() if name in chosen or name not in REQUEST_KEYS}
        sent = request_of(options).to_kwargs()  # type: ignore[arg-type]
        assert sent.keys() == chosen
        assert GenerateRequest.parse(sent).to_kwargs() == prepared(**{"prompt": None, **options}).request.to_kwargs()


def test_a_checked_request_is_sent_as_it_is() -> None:
    request = GenerateRequest.parse({"prompt": "a", "sampling_params": {"n": 2}})
    submission = prepared(prompt=None, request=request)
    assert submission.request is request
    assert submission.headers == prepared(prompt="a", sampling_params={"n": 2}).headers


@pytest.mark.parametrize("beside", [{"prompt": "a"}, {"sampling_params": {"n": 1}}, {"lora": "french"}])
def test_a_checked_request_excludes_what_it_holds(beside: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=f"request must be given without {next(iter(beside))}"):
        prepared(**{"prompt": None, "request": GenerateRequest(prompt="b"), **beside})


def test_a_request_that_is_no_generate_request_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="request must be a GenerateRequest, got"):
        prepared(prompt=None, request={"prompt": "a"})


@pytest.mark.parametrize(("params", "choices"), [(None, None), ({"n": 1}, None), ({"n": None}, None), ({"n": 8}, 8)])
def test_a_header_tells_workers_how_many_choices_a_request_has(params: Any, choices: int | None) -> None:
    assert prepared(sampling_params=params).headers.get("choices") == choices
