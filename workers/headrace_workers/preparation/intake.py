"""Reads messages: `Incoming` holds the headers, and `Intake` checks the body.

For most messages, `Intake` runs in a preparation process. `plain_requests.py` has the others.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from headrace_broker.client.tracing import CONTEXT_HEADERS
from headrace_broker.decisions import DECIDE_TASK, DecideRequest
from headrace_broker.messages import TASK_NAME, GenerateRequest
from headrace_broker.results import ErrorInfo
from headrace_broker.streams.listeners import is_abandon_after
from headrace_engine.api.input_processor import InputProcessor
from headrace_engine.requests.sampling_params import RequestOutputKind, SamplingParams
from headrace_engine.text.chat import ChatOptions
from headrace_wire.codes import PRIORITY_STEPS, ErrorCode
from headrace_wire.due import due_problem
from headrace_wire.errors import InvalidRequestError
from headrace_wire.pooling import wrong_task
from headrace_wire.values import is_unicode
from headrace_wire.wire_number import wire_problem
from headrace_workers.errors import HeadraceWorkerError
from headrace_workers.preparation.arguments import keyword_arguments
from headrace_workers.preparation.callback_rules import MAX_BODY_BYTES, CallbackRules
from headrace_workers.preparation.celery_request import CeleryRequest
from headrace_workers.preparation.decision_intake import PreparedDecision, prepare_decision

PROMPT_TAIL_CHARS = 64
_SERVED = (TASK_NAME, DECIDE_TASK)
_LATEST_UNIX_TIME = 1e11
_NO_TOOLS = "the chat template of this model does not support tools: describe them in a message, or leave tools out"
MALFORMED = "the message is malformed: its body does not follow Celery's protocol 2"


class RefusedError(HeadraceWorkerError):
    """The request cannot be served, now or later."""

    def __init__(self, code: str, message: str) -> None:
        self.error = ErrorInfo(code, message)
        super().__init__(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """The headers of a message. Another process decodes its body."""

    request_id: str
    priority: int
    redelivered: bool
    enqueued_at: float | None
    """Unix seconds by the producer's clock."""
    queued_at: float | None = None
    """When the message became available to workers, by the monotonic clock; None if unknown."""
    clock: Literal["producer", "redis"] | None = None
    """The source of `queued_at`: the producer's clock compared with this machine's, or Redis's clock only."""
    tenant: str | None
    cache_salt: str | None = None
    """Further divides the tenant's part of the prefix cache."""
    over_quota: int
    """The tenant's quota if it is exceeded and this request must be refused; else 0."""
    abandon_after: float | None = None
    """Seconds without a subscriber heartbeat after which the request is cancelled."""
    trace_headers: dict[str, Any] = field(repr=False, default_factory=dict)
    deadline: float | None
    """Unix seconds: the earlier of the message's expiry and the end of its time limit, which counts from receipt."""
    step: int = 0
    """Priority step of the list that held the message."""
    preemptions: int = 0
    """How often the request was preempted."""
    header_problem: str | None = None
    """What is wrong with the header `due` or `wire`; None if each is valid or absent."""
    delay: float = 0.0
    """Seconds until the producer's ETA, by this machine's clock; 0 if it has passed."""

    @classmethod
    def read(cls, celery_request: CeleryRequest) -> "Incoming":
        """Read the headers. An optional header with an invalid value counts as absent, except for `due` and `wire`."""
        headers = celery_request.request_dict
        delivery = celery_request.delivery_info
        priority = delivery.get("priority")
        enqueued_at, eta = _seconds(headers.get("enqueued_at")), celery_request.due
        queued_at, clock = _queued_at(enqueued_at, eta, celery_request.delivery.queued_at)
        return cls(
            request_id=celery_request.id,
            priority=min(max(priority, 0), 9) if isinstance(priority, int) else 0,
            redelivered=bool(delivery.get("redelivered")),
            enqueued_at=enqueued_at,
            queued_at=queued_at,
            clock=clock,
            trace_headers={name: headers[name] for name in CONTEXT_HEADERS if name in headers},
            abandon_after=float(headers["abandon_after"]) if is_abandon_after(headers.get("abandon_after")) else None,
            tenant=tenant_of(celery_request),
            cache_salt=_text(headers.get("cache_salt")),
            over_quota=celery_request.delivery.over_quota,
            deadline=_deadline(celery_request.expires, celery_request.time_limits),
            step=celery_request.delivery.step,
            preemptions=celery_request.delivery.preemptions,
            header_problem=wire_problem(headers.get("wire")) or due_problem(headers.get("due")),
            delay=max(0.0, eta.timestamp() - time.time()) if isinstance(eta, datetime) else 0.0,
        )

    @property
    def engine_priority(self) -> int:
        """The priority in the engine: the message's, or the step to which it has moved up because of its due time."""
        sent_with = max(step for step in PRIORITY_STEPS if step <= self.priority)
        return self.step if self.step < sent_with else self.priority

    @property
    def waited(self) -> float | None:
        """Seconds that the message waited in the queue; None if that is unknown, or if the request was preempted."""
        return None if self.queued_at is None or self.preemptions else time.monotonic() - self.queued_at


def tenant_of(celery_request: CeleryRequest) -> str | None:
    """Get the tenant that the message names, or None."""
    return tenant_in(celery_request.request_dict)


def tenant_in(headers: Mapping[str, Any]) -> str | None:
    """Get the tenant in a message's headers, or None."""
    return _text(headers.get("tenant"))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and is_unicode(value) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request that is checked and tokenised; plain data."""

    token_ids: list[int]
    bad_words_token_ids: list[list[int]]
    params: dict[str, Any]
    given_numbers: dict[str, float]
    """The numeric sampling parameters that the message itself sets."""
    is_chat: bool
    lora: str | None
    prompt_tail: str | None
    """The end of a rendered chat; None for other prompts."""

    @property
    def num_choices(self) -> int:
        return int(self.params.get("n", 1))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class Intake:
    """Checks whether the engine can serve a message's body. It has no side effects."""

    def __init__(
        self, processor: InputProcessor, served_names: Sequence[str], callback_rules: CallbackRules | None = None
    ) -> None:
        self._processor = processor
        self._served_names = served_names
        self._callback_rules = callback_rules or CallbackRules()

    def process(self, request_id: str, body: Any, task_name: str = TASK_NAME) -> Prepared | PreparedDecision:
        """Check a decoded body and tokenise its prompt.

        Raises:
            RefusedError: with the error code and message for the client.
        """
        kwargs = kwargs_of(body, task_name, self._callback_rules)
        if task_name not in _SERVED:
            asked = task_name.removeprefix("headrace.")
            raise RefusedError(ErrorCode.UNSUPPORTED, wrong_task(self._served_names[0], ["generate", "decide"], asked))
        try:
            if task_name == DECIDE_TASK:
                decision = DecideRequest.parse(kwargs)
                check_model(decision.model, self._served_names)
                return prepare_decision(decision, self._processor)
            request = GenerateRequest.parse(kwargs)
            check_model(request.model, self._served_names)
            return self._check(request_id, request)
        except InvalidRequestError as error:
            raise RefusedError(error.code, str(error)) from error

    def _check(self, request_id: str, request: GenerateRequest) -> Prepared:
        given = {**self._processor.model_info.default_sampling_params, **request.sampling_params}
        params = SamplingParams.from_dict({**given, "output_kind": RequestOutputKind.DELTA})
        if request.messages is not None:
            check_tools(request, self._processor)
            checked = self._processor.check_chat(request.messages, params, ChatOptions(**request.chat_options))
        else:
            checked = self._processor.check(prompt_of(request, self._processor), params)
        if params.seed is None:
            # Derived from the id, so that another worker draws the same numbers.
            params.seed = seed_of(request_id)
        if params.allowed_token_ids is not None:  # a list may name a token many times
            params.allowed_token_ids = list(dict.fromkeys(params.allowed_token_ids))
        return Prepared(
            token_ids=checked.token_ids,
            bad_words_token_ids=checked.bad_words_token_ids,
            params=params.to_dict(),
            given_numbers={
                name: value for name, value in request.sampling_params.items() if isinstance(value, int | float)
            },
            is_chat=request.messages is not None,
            lora=request.lora,
            prompt_tail=(checked.text or "")[-PROMPT_TAIL_CHARS:] if request.messages is not None else None,
        )


def kwargs_of(body: Any, task_name: str, callback_rules: CallbackRules) -> dict[str, Any]:
    """Return the keyword arguments in a decoded body, and check its links. Raises RefusedError."""
    if not _is_protocol_2(body):
        raise RefusedError(ErrorCode.INVALID_REQUEST, MALFORMED)
    args, kwargs, embed = body
    try:
        callback_rules.check(embed)
        return keyword_arguments(task_name, args, kwargs)
    except InvalidRequestError as error:
        raise RefusedError(ErrorCode.INVALID_REQUEST, str(error)) from error


def check_size_with_links(body: bytes | str, decoded: Any) -> None:
    """Raise RefusedError if a body has links and is too large to be decoded again when the request ends."""
    if len(body) > MAX_BODY_BYTES and _is_protocol_2(decoded) and any(decoded[2].values()):
        problem = f"the body of a message with callbacks must have at most {MAX_BODY_BYTES} bytes, got {len(body)}"
        raise RefusedError(ErrorCode.INVALID_REQUEST, problem)


def check_model(model: str | None, served_names: Sequence[str]) -> None:
    """Raise RefusedError if the request names a model that is not served."""
    if model is not None and model not in served_names:
        served = " and ".join(served_names)
        message = f"model {model!r} is not served here; this queue serves {served}"
        raise RefusedError(ErrorCode.MODEL_NOT_FOUND, message)


def check_tools(request: GenerateRequest, processor: InputProcessor) -> None:
    """Raise RefusedError if the request has tools and the chat template does not support them."""
    if request.tools and not processor.shows_tools:
        raise RefusedError(ErrorCode.UNSUPPORTED, _NO_TOOLS)


def prompt_of(request: GenerateRequest, processor: InputProcessor) -> str | list[int]:
    """Return the prompt of a request that is no chat. An empty text becomes the model's start token."""
    prompt = request.prompt if request.prompt is not None else request.prompt_token_ids
    assert prompt is not None
    return processor.start_ids if prompt == "" else prompt


def _is_protocol_2(body: Any) -> bool:
    """Return whether the body is [args, kwargs, embed], of the right types."""
    if not isinstance(body, list | tuple) or len(body) != 3:
        return False
    args, kwargs, embed = body
    return isinstance(args, list | tuple) and isinstance(kwargs, dict) and isinstance(embed, dict)


def _deadline(expires: Any, time_limits: Any) -> float | None:
    """Get the earliest of Celery's `expires` and its hard and soft time limits, which count from now."""
    moments = [expires.timestamp()] if isinstance(expires, datetime) else []
    moments += [time.time() + limit for limit in map(_seconds, time_limits) if limit is not None]
    return min(moments, default=None)


def _queued_at(
    enqueued_at: float | None, eta: Any, by_redis: float | None
) -> tuple[float | None, Literal["producer", "redis"] | None]:
    """Return the monotonic time at which a message began to wait, and the source of that time.

    A producer's clock may be wrong, so a wait is never shorter than the one that Redis measured. A message with an ETA
    begins to wait at its ETA.
    """
    if enqueued_at is None:
        return by_redis, None if by_redis is None else "redis"
    since = max(enqueued_at, eta.timestamp()) if isinstance(eta, datetime) else enqueued_at
    now = time.monotonic()
    by_producer = now - max(0.0, time.time() - since)
    if by_redis is None or by_producer <= by_redis:
        return by_producer, "producer"
    return by_redis, "redis"


def _seconds(value: Any) -> float | None:
    """Read a producer's time or time limit; None for an invalid one, such as NaN or a number beyond floats."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _LATEST_UNIX_TIME:
        return float(value)
    return None


def seed_of(request_id: str) -> int:
    """Make the seed of a request that has none: a 64-bit digest of its id."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "big", signed=True)
