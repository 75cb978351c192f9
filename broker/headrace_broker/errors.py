"""Every error that this package raises, in one tree. Each message can be shown to the caller as it is."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import redis

from headrace_broker.reasons import ErrorCode

if TYPE_CHECKING:
    from headrace_broker.results import GenerateResult


class HeadraceBrokerError(Exception):
    """Base class of all errors of this package."""


class SettingsError(HeadraceBrokerError, ValueError):
    """A setting or its environment variable has an invalid value."""


class InvalidRequestError(HeadraceBrokerError, ValueError):
    """The request is invalid. `problems` holds every reason, `code` the error code of the wire."""

    def __init__(self, problems: Sequence[str], *, code: str = ErrorCode.INVALID_REQUEST) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)
        self.code = code


class UsedRequestIdError(InvalidRequestError):
    """The id that the caller chose belongs to a request that runs or has ended. Nothing was sent."""

    def __init__(self, request_id: str) -> None:
        used = f"request_id {request_id!r} was used for a request that runs or has ended"
        super().__init__([f"{used}: choose a new id"])
        self.request_id = request_id


class UnknownModelError(HeadraceBrokerError, LookupError):
    """No worker ever registered this model, but other models are registered."""

    def __init__(self, model: str, known: Iterable[str]) -> None:
        self.model = model
        self.known = tuple(sorted(known))
        super().__init__(f"no worker has ever served the model {model!r}; known models: {', '.join(self.known)}")


class QueueFullError(HeadraceBrokerError):
    """The queue is at its limit of requests. Nothing was sent.

    `retry_after_seconds` estimates when there will be room, from how long the queue's first request has waited; None if
    it is unknown.
    """

    def __init__(self, model: str, queued: int, limit: int, retry_after_seconds: float | None) -> None:
        when = "later" if retry_after_seconds is None else f"in about {retry_after_seconds:.0f} s"
        super().__init__(f"the queue of {model} is full: it holds {queued} of at most {limit} requests; try {when}")
        self.model = model
        self.queued = queued
        self.limit = limit
        self.retry_after_seconds = retry_after_seconds


class TenantQueueFullError(QueueFullError):
    """The queue is at its limit of requests of this tenant. Nothing was sent. `tenant` is '' for none."""

    def __init__(self, model: str, tenant: str, queued: int, limit: int, retry_after_seconds: float | None) -> None:
        super().__init__(model, queued, limit, retry_after_seconds)
        when = "later" if retry_after_seconds is None else f"in about {retry_after_seconds:.0f} s"
        whose = f"of tenant {tenant!r}" if tenant else "that name no tenant"
        self.args = (f"the queue of {model} holds {queued} of at most {limit} requests {whose}; try {when}",)
        self.tenant = tenant


class QueueUnavailableError(HeadraceBrokerError, ConnectionError):
    """The Redis server could not be reached, or refused the operation."""

    def __init__(self, url: str, action: str, cause: BaseException) -> None:
        what = "refused" if isinstance(cause, redis.ResponseError) else "is unavailable"
        super().__init__(f"could not {action}: Redis at {url} {what} ({type(cause).__name__}: {cause})")
        self.url = url


class RequestFailedError(HeadraceBrokerError):
    """The request did not succeed. `result` holds the output so far, if it is known."""

    def __init__(self, request_id: str, code: str, message: str, *, result: "GenerateResult | None" = None) -> None:
        super().__init__(f"request {request_id} failed with {code}: {message}")
        self.request_id = request_id
        self.code = code
        self.message = message
        self.result = result


class ResultTimeoutError(HeadraceBrokerError, TimeoutError):
    """Nothing arrived within the caller's timeout."""

    def __init__(self, request_id: str, seconds: float, awaited: str) -> None:
        super().__init__(f"request {request_id}: no {awaited} within {seconds:g} s")
        self.request_id = request_id


class StreamExpiredError(HeadraceBrokerError, LookupError):
    """The stream has expired, or was deleted while it was read.

    `last_id` is the id of the last entry read; 0-0 if none was.
    """

    def __init__(self, request_id: str, last_id: str) -> None:
        super().__init__(f"the stream of request {request_id} has expired; the last entry read was {last_id}")
        self.request_id = request_id
        self.last_id = last_id


class TooManySubscribersError(HeadraceBrokerError):
    """The stream has the largest number of subscribers that one `StreamHub` allows."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"this stream has {limit} subscribers in this process, the maximum; try again later")


class TokenizerCallError(HeadraceBrokerError):
    """A tokenizer call failed. `code` is an error code of a request, or `tokenizer_unavailable`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class MalformedEntryError(HeadraceBrokerError, ValueError):
    """A stream entry, result or registry value does not have the format of the wire."""

    request_id: str | None = None
    """The request whose stream holds the entry, set by a reader of several streams."""


class MalformedMessageError(HeadraceBrokerError, ValueError):
    """No worker can use a message in a queue. The error quotes only its content type."""


class TransportConfigurationError(HeadraceBrokerError, ValueError):
    """The lease transport is configured in a way that would break its delivery guarantees."""


class EmbeddedServerError(HeadraceBrokerError, RuntimeError):
    """No server program was found, or the server did not start."""
