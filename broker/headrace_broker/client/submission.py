"""Builds a client's messages and decodes its replies. Both kinds of client share this code, which does no I/O."""

import hashlib
import json
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, TypedDict

from headrace_broker.call_rules import check_all
from headrace_broker.content import loads_stored
from headrace_broker.decisions import DecideRequest
from headrace_broker.errors import InvalidRequestError, MalformedEntryError, MalformedMessageError
from headrace_broker.keys import ended_key, stream_key
from headrace_broker.messages import GenerateRequest
from headrace_broker.packing import pack, unpack
from headrace_broker.pooling_messages import PoolingRequest
from headrace_broker.results import ErrorInfo, GenerateResult, RequestFailedError
from headrace_broker.scripts import script
from headrace_broker.server.shards import id_in_keys
from headrace_broker.server.stream_table import MAIN
from headrace_broker.streams.events import ChunkEvent, EndEvent, StreamEvent
from headrace_broker.streams.listeners import LONGEST_SECONDS, SHORTEST_SECONDS, is_abandon_after
from headrace_broker.streams.writer import END_STREAM, end_data
from headrace_wire.chat import text_of
from headrace_wire.codes import ErrorCode
from headrace_wire.request import REQUEST_KEYS, name_problems
from headrace_wire.values import is_integer, is_number, plain, shown
from headrace_wire.wire_number import WIRE_NUMBER

LOWEST_PRIORITY: Final = 9
STREAM_STATUS: Final = script("stream_prelude", "stream_status")
QUEUED_CANCEL_TTL_SECONDS: Final = 86_400
"""How long a cancellation is kept for a request that may still wait in the queue."""

_PREFIX_CHARS: Final = 256
_PREFIX_TOKENS: Final = 64
_HASH_BYTES: Final = 8

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_LONGEST_WAIT: Final = timedelta(days=365)

RequestState = Literal["pending", "running", "finished"]


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """The state of a request. `pending`: no worker has begun it, or its stream has expired, or the id is unknown."""

    state: RequestState
    attempt: int = 0
    tokens: int = 0  # generated so far, of all choices
    finish_reason: str | None = None
    rows: int = 0  # computed so far, of a pooling request; it has no tokens


@dataclass(frozen=True, slots=True)
class Submission:
    """A checked request with the message headers and properties that the queue uses."""

    request: GenerateRequest | PoolingRequest | DecideRequest
    model: str
    request_id: str
    priority: int
    expires: datetime | None
    headers: Mapping[str, Any] = field(repr=False)
    has_given_id: bool = False
    """Whether the caller chose the request id, which may have been used before."""


class QueueOptions(TypedDict, total=False):
    """Options of any request that say how the queue treats it."""

    model: str | None  # served name; the client's own unless given
    priority: int | None  # 0 is served first, 9 last
    expires: float | datetime | None  # the deadline: seconds from now, or a datetime with a time zone
    due: float | datetime | None  # when it should have ended, given like `expires`: the most urgent one is served first
    tenant: str | None
    key_name: str | None  # name of the API key, for the usage ledger; never the key itself
    abandon_after: float | None  # 1 to 3600 seconds without a subscriber after which the request is cancelled
    idempotency_key: str | None  # the same key, model and tenant within a day mean the same request
    request_id: str | int | uuid.UUID | None  # a new one unless given


class SubmitOptions(QueueOptions, total=False):
    """Options of a request besides its prompt and sampling parameters."""

    messages: Sequence[Mapping[str, Any]] | None  # chat, instead of a prompt
    tools: Sequence[Mapping[str, Any]] | None  # functions that the chat template shows to the model
    chat_template_kwargs: Mapping[str, Any] | None  # further variables of the chat template
    add_generation_prompt: bool | None  # the prompt ends where the assistant's turn begins; true unless given
    continue_final_message: bool | None  # the output continues the last message
    prompt_token_ids: Sequence[int] | None  # instead of a prompt
    lora: str | None  # name of a LoRA adapter that the model's workers serve
    cache_salt: str | None  # only requests of one tenant with the same salt share blocks of a prefix cache
    # --prefix-affinity treats prompts of one tenant with the same key as if they began alike, and those without
    # messages as turns of one conversation
    prefix_key: str | None
    request: GenerateRequest | None  # made by `GenerateRequest.parse`; replaces the prompt and its options


class SubmitRequest(SubmitOptions, total=False):
    """One request for `submit_many`."""

    prompt: str | None
    sampling_params: Mapping[str, Any] | None


_OPTIONS: Final = SubmitRequest.__annotations__.keys()
_CONTENT: Final = frozenset(REQUEST_KEYS) - {"model"}  # the model selects the queue


def request_of(options: SubmitRequest) -> GenerateRequest:
    """Check the options that become the task's keyword arguments. Raises InvalidRequestError with every problem."""
    return GenerateRequest.parse({key: value for key, value in options.items() if key in _CONTENT})


def prepare(options: SubmitRequest, *, default_model: str | None, now: Callable[[], float] = time.time) -> Submission:
    """Check a request and all its options. A given `request` is already checked. Raises InvalidRequestError."""
    problems = [f"unknown option {str(name)[:40]!r}" for name in options if name not in _OPTIONS]
    request = _request(options, problems)
    return submission_of(request, options, problems, default_model=default_model, now=now)


def submission_of(
    request: GenerateRequest | PoolingRequest | DecideRequest,
    options: SubmitRequest,
    problems: list[str],
    *,
    default_model: str | None,
    now: Callable[[], float] = time.time,
) -> Submission:
    """Check the options of a checked request. Raises InvalidRequestError with their problems after `problems`."""
    model = options.get("model")
    model = default_model if model is None else model
    if model is None:
        problems.append("model must be given, in the call or when the client is created")
    else:
        problems += name_problems("model", model)
    priority = plain(options.get("priority"))
    priority = 0 if priority is None else priority
    if not (is_integer(priority) and 0 <= priority <= LOWEST_PRIORITY):
        problems.append(f"priority must be an integer from 0 (first) to {LOWEST_PRIORITY}, got {shown(priority)}")
    request_id = _request_id(options.get("request_id"))
    if not _REQUEST_ID.fullmatch(request_id):
        given = shown(options.get("request_id"))
        problems.append(f"request_id must be 1 to 128 of the characters A-Z a-z 0-9 . _ : -, got {given}")
    headers: dict[str, Any] = {"wire": WIRE_NUMBER, "enqueued_at": now()}
    if not isinstance(request, PoolingRequest):
        prompt, choices = _prompt_and_choices(request)
        headers["prefix"] = prefix_of(prompt, model if isinstance(model, str) else "")
        if choices > 1:
            headers["choices"] = choices
    for header in ("tenant", "key_name", "cache_salt", "idempotency_key"):
        if (value := options.get(header)) is not None:
            problems += name_problems(header, value)
            headers[header] = value
    if (prefix_key := options.get("prefix_key")) is not None:
        problems += name_problems("prefix_key", prefix_key)
    if (abandon_after := plain(options.get("abandon_after"))) is not None:
        if not is_abandon_after(abandon_after):
            limits = f"{SHORTEST_SECONDS} to {LONGEST_SECONDS}"
            problems.append(f"abandon_after must be a number of seconds from {limits}, got {shown(abandon_after)}")
        headers["abandon_after"] = abandon_after
    deadline = _moment("expires", plain(options.get("expires")), headers["enqueued_at"], problems)
    due = _moment("due", plain(options.get("due")), headers["enqueued_at"], problems)
    headers |= {} if due is None else {"due": due.timestamp()}
    if problems or model is None:
        raise InvalidRequestError(problems)
    if not isinstance(request, PoolingRequest):
        headers |= _conversation_headers(prompt, headers)
    if prefix_key is not None:
        headers["prefix"] = _digest([model, headers.get("tenant"), prefix_key])
        if not isinstance(request, PoolingRequest) and "conversation" not in headers:
            headers["continues"] = headers["conversation"] = headers["prefix"]
    return Submission(request, model, request_id, priority, deadline, headers, options.get("request_id") is not None)


def _prompt_and_choices(request: GenerateRequest | DecideRequest) -> tuple[GenerateRequest, int]:
    """Return the request's prompt, and the slots of the engine that it takes, as far as its producer knows."""
    if isinstance(request, DecideRequest):
        return GenerateRequest(messages=request.messages, lora=request.lora), len(request.questions)
    return request, request.sampling_params.get("n") or 1


def _request(options: SubmitRequest, problems: list[str]) -> GenerateRequest:
    """Return the checked request of a submission. Append its problems, if any, and return an empty request."""
    request: object = options.get("request")
    if request is None:
        try:
            return request_of(options)
        except InvalidRequestError as error:
            problems += error.problems
            return GenerateRequest()
    beside = [name for name, value in options.items() if name in _CONTENT and value is not None]
    if beside:
        problems.append(f"request must be given without {', '.join(beside)}")
    if not isinstance(request, GenerateRequest):
        problems.append(f"request must be a GenerateRequest, got {shown(request)}")
        return GenerateRequest()
    return request


def _request_id(given: object) -> str:
    """Return the id as a string. A value that cannot be an id becomes a string that is refused later."""
    given = plain(given)
    if given is None:
        return uuid.uuid4().hex
    if isinstance(given, int) and not isinstance(given, bool):
        return str(given) if abs(given) < 2**256 else ""  # str() fails for integers of more than 4300 digits
    return str(given) if isinstance(given, (str, uuid.UUID)) else ""


def require_model(model: str | None) -> str:
    """Return the served name of a call after checking it. Raises InvalidRequestError."""
    if model is None:
        raise InvalidRequestError("model must be given, in the call or when the client is created")
    if problems := name_problems("model", model):
        raise InvalidRequestError(problems)
    return model


def prefix_of(request: GenerateRequest, model: str) -> str:
    """Return a hash of the prompt's beginning: its system message, or else its first characters or tokens.

    Requests with the same hash probably share blocks of a worker's prefix cache.
    """
    beginning: object
    if request.messages:
        first = request.messages[0]
        text = text_of(first) if first["role"] == "system" else text_of(first)[:_PREFIX_CHARS]
        beginning = [request.tools, text] if request.tools else text
    elif request.prompt_token_ids:
        beginning = request.prompt_token_ids[:_PREFIX_TOKENS]
    else:
        beginning = (request.prompt or "")[:_PREFIX_CHARS]
    return _digest([model, request.lora, beginning])


def _conversation_headers(request: GenerateRequest, headers: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers `continues` and `conversation` of a chat.

    `conversation` is a hash of all messages but the answers, and `continues` is that of the request that got the last
    answer. Answers are left out because clients may change them: some remove the reasoning. A chat without an answer
    continues nothing, so a system prompt that many chats have in common makes none of them alike.
    """
    seed = _digest([request.lora, request.tools, headers.get("tenant"), headers.get("cache_salt")])
    conversation, answered, continues = hashlib.blake2b(seed.encode(), digest_size=_HASH_BYTES), None, None
    for message in request.messages or ():
        if message["role"] == "assistant":
            answered = conversation.hexdigest()
        else:
            continues, text = answered, text_of(message).encode(errors="surrogatepass")
            conversation.update(b"%s\n%d\n%s" % (message["role"].encode(errors="surrogatepass"), len(text), text))
    found = {"conversation": conversation.hexdigest()} if request.messages else {}
    return found if continues is None else {"continues": continues, **found}


def _digest(parts: Sequence[Any]) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=_HASH_BYTES).hexdigest()


def prepare_all(many: Iterable[SubmitRequest], *, default_model: str | None) -> list[Submission]:
    """Check all requests before any is sent. Raises InvalidRequestError with the problems of all of them."""
    submissions, problems = [], []
    for position, options in enumerate(check_all("requests", many, Mapping)):
        try:
            submissions.append(prepare(options, default_model=default_model))
        except InvalidRequestError as error:
            problems += [f"request {position}: {problem}" for problem in error.problems]
    if problems:
        raise InvalidRequestError(problems)
    return submissions


def _moment(name: str, given: float | datetime | None, now: float, problems: list[str]) -> datetime | None:
    """Return the time that an option gives, or None. Append its problem, if any."""
    if given is None:
        return None
    if isinstance(given, datetime):
        if given.tzinfo is None:
            problems.append(f"{name} must be seconds from now or a datetime with a time zone, not a naive datetime")
            return None
        seconds = given.timestamp() - now
    elif is_number(given):
        seconds = float(given)
    else:
        problems.append(f"{name} must be seconds from now or a datetime, got {shown(given)}")
        return None
    if not 0 < seconds <= _LONGEST_WAIT.total_seconds():
        problems.append(f"{name} must be within the next {_LONGEST_WAIT.days} days, got {seconds:g} s from now")
        return None
    return datetime.fromtimestamp(now + seconds, UTC)


def cancel_call(request_id: str, ttl_seconds: int, home: str = MAIN) -> dict[str, Any]:
    """Return the keys and arguments of `stream_end.lua` for a cancellation by a client, at one home of the stream."""
    name = id_in_keys(home, request_id)
    end = end_data("cancelled", None, ErrorInfo(ErrorCode.CANCELLED, "the client cancelled the request"))
    return {
        "keys": END_STREAM.keys(stream=stream_key(name), ended=ended_key(name)),
        "args": [pack(end), ttl_seconds, QUEUED_CANCEL_TTL_SECONDS],
    }


def was_cancelled(found: bytes | None) -> bool:
    """Return whether this call or an earlier one cancelled the request. `found` is the reply of `stream_end.lua`."""
    return found is None or unpack(found).get("finish_reason") == "cancelled"


def cancelled_in_advance(reply: Sequence[Any]) -> bool:
    """Return whether a stream has only the end of a cancellation, as any home of an unknown request may have one.

    `reply` is that of `stream_status.lua`. The end of a stream that a worker has begun is of a later attempt.
    """
    attempt, count, kind, packed = reply
    return (attempt, count, kind) == (1, 0, b"end") and unpack(packed).get("finish_reason") == "cancelled"


def read_status(reply: Sequence[Any] | None) -> RequestStatus:
    """Decode the reply of `stream_status.lua`."""
    if reply is None:
        return RequestStatus("pending")
    attempt, count, kind, packed = reply
    data = unpack(packed)
    pools = "bytes" in data or "truncated" in data
    tokens, rows = (0, count) if pools else (count, 0)
    if kind != b"end":
        return RequestStatus("running", attempt, tokens, rows=rows)
    return RequestStatus("finished", attempt, tokens, str(data.get("finish_reason")), rows)


def chunk_of(request_id: str, event: StreamEvent) -> ChunkEvent | None:
    """Return the event if it is a chunk, else None. Raises RequestFailedError for an end with an error."""
    if isinstance(event, EndEvent) and event.error is not None:
        raise RequestFailedError(request_id, event.error.code, event.error.message)
    return event if isinstance(event, ChunkEvent) else None


def read_result(request_id: str, meta: bytes) -> GenerateResult | None:
    """Decode a result that Celery's result backend stored as JSON or msgpack; None if the task has not ended."""
    try:
        stored = loads_stored(meta)
    except MalformedMessageError as error:
        raise MalformedEntryError(f"the result of request {request_id} cannot be read: {error}") from error
    if not isinstance(stored, Mapping):
        raise MalformedEntryError(f"the result of request {request_id} is not a map but {type(stored).__name__}")
    status, value = stored.get("status"), stored.get("result")
    if status == "SUCCESS":
        if not isinstance(value, Mapping):
            raise MalformedEntryError(f"the result of request {request_id} is not a map but {type(value).__name__}")
        result = GenerateResult.from_wire(value)
        if result.error is not None:
            raise RequestFailedError(request_id, result.error.code, result.error.message, result=result)
        return result
    if status == "REVOKED":
        reason = _celery_message(value, "the task was revoked")
        raise RequestFailedError(request_id, "expired" if reason.endswith("expired") else "cancelled", reason)
    if status == "FAILURE":
        raise RequestFailedError(request_id, ErrorCode.ENGINE_ERROR, _celery_message(value, "the task failed"))
    return None


def _celery_message(value: Any, otherwise: str) -> str:
    if not isinstance(value, Mapping):
        return otherwise
    message = value.get("exc_message")
    text = " ".join(map(str, message)) if isinstance(message, (list, tuple)) else str(message or "")
    return f"{value.get('exc_type', otherwise)}: {text}" if text else otherwise
