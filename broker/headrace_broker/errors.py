"""The exceptions of the broker. Each message can be shown to the caller as it is.

HeadraceBrokerError
├── SettingsError                  a setting or its environment variable has an invalid value
├── InvalidRequestError            the request is invalid; has a list of all problems (in headrace_wire)
│   └── UsedRequestIdError         the id that the caller chose belongs to another request
├── UnknownModelError              no worker ever registered the model
├── QueueFullError                 the queue is at its limit of requests
│   └── TenantQueueFullError       the queue is at its limit of requests of one tenant
├── QueueUnavailableError          Redis could not be reached, or refused the operation
│   └── StreamServerUnavailableError  a stream server that may have the stream could not be reached
├── RequestFailedError             the request did not succeed (in `results.py`, beside the result that it holds)
├── ResultTimeoutError             nothing arrived within the caller's timeout
├── StreamExpiredError             the stream has expired, or was deleted while it was read
├── TooManySubscribersError        the stream has the largest number of subscribers that one hub allows
├── TokenizerCallError             a tokenizer call failed
├── MalformedEntryError            a stream entry, result or registry value does not have the format of the wire
├── MalformedMessageError          a message in a queue is of no use to any worker
├── CallbacksTooLargeError         what a request sends when it ends is too large
├── TransportConfigurationError    the lease transport would lose its delivery guarantees
└── EmbeddedServerError            no server program was found, or the server did not start
"""

from collections.abc import Iterable

import redis

from headrace_wire.errors import HeadraceBrokerError as HeadraceBrokerError
from headrace_wire.errors import InvalidRequestError as InvalidRequestError


class SettingsError(HeadraceBrokerError, ValueError):
    """A setting or its environment variable has an invalid value."""


class UsedRequestIdError(InvalidRequestError):
    """The id that the caller chose belongs to a request that runs or has ended. Nothing was sent."""

    def __init__(self, request_id: str) -> None:
        used = f"request_id {request_id!r} was used for a request that runs or has ended"
        super().__init__(f"{used}: choose a new id")
        self.request_id = request_id


class UnknownModelError(HeadraceBrokerError, LookupError):
    """No worker ever registered this model, but other models are registered."""

    def __init__(self, model: str, known: Iterable[str]) -> None:
        self.model = model
        self.known = tuple(sorted(known))
        super().__init__(f"no worker has ever served the model {model!r}; known models: {', '.join(self.known)}")


class QueueFullError(HeadraceBrokerError):
    """The queue is at its limit of requests. Nothing was sent.

    `retry_after_seconds` is an estimate of the seconds until there is room, from the time that the queue's oldest
    request has waited. It is None if that time is unknown.
    """

    def __init__(self, model: str, queued: int, limit: int, retry_after_seconds: float | None) -> None:
        when = "later" if retry_after_seconds is None else f"in about {retry_after_seconds:.0f} s"
        super().__init__(f"the queue of {model} is full: it holds {queued} of at most {limit} requests; try {when}")
        self.model = model
        self.queued = queued
        self.limit = limit
        self.retry_after_seconds = retry_after_seconds


class TenantQueueFullError(QueueFullError):
    """The queue is at its limit of requests of `tenant`, which is '' if the request names none. Nothing was sent."""

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


class StreamServerUnavailableError(QueueUnavailableError):
    """A stream server could not be reached, or refused, and no other server that may have the stream has it."""

    def __init__(self, stream_server: str, address: str, action: str, cause: BaseException) -> None:
        super().__init__(address, action, cause)
        what = "refused" if isinstance(cause, redis.ResponseError) else "is away"
        where = f"the stream server {stream_server} at {address} {what}"
        self.args = (f"could not {action}: {where} ({type(cause).__name__}: {cause})",)
        self.stream_server = stream_server


class ResultTimeoutError(HeadraceBrokerError, TimeoutError):
    """Nothing arrived within the caller's timeout."""

    def __init__(self, request_id: str, seconds: float, awaited: str) -> None:
        super().__init__(f"request {request_id}: no {awaited} within {seconds:g} s")
        self.request_id = request_id


class StreamExpiredError(HeadraceBrokerError, LookupError):
    """The stream has expired, or was deleted while it was read.

    `last_id` is the id of the last entry read; 0-0 if none was. `has_ended` is false if the server does not know the
    request: the stream may be on another one.
    """

    def __init__(self, request_id: str, last_id: str, *, has_ended: bool = True) -> None:
        super().__init__(f"the stream of request {request_id} has expired; the last entry read was {last_id}")
        self.request_id = request_id
        self.last_id = last_id
        self.has_ended = has_ended


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
    """A message in a queue is of no use to any worker. The error quotes only the message's content type."""


class CallbacksTooLargeError(HeadraceBrokerError):
    """What a request sends when it ends is too large."""

    def __init__(self, num_bytes: int, limit: int) -> None:
        super().__init__(f"the callbacks of one request must have at most {limit} bytes in all, got {num_bytes}")


class TransportConfigurationError(HeadraceBrokerError, ValueError):
    """The lease transport is configured in a way that would break its delivery guarantees."""


class EmbeddedServerError(HeadraceBrokerError, RuntimeError):
    """No server program was found, or the server did not start."""
