"""Error codes, and reasons that more than one package knows. Each is declared here alone.

docs/wire.md describes the codes of a request, docs/gateway.md those of the gateway, docs/batch.md those of batches.
"""

from enum import StrEnum
from typing import Final, Literal, TypeAlias, get_args


class ErrorCode(StrEnum):
    """Values of `error.code` in a stream's end and in a result."""

    INVALID_REQUEST = "invalid_request"
    MODEL_NOT_FOUND = "model_not_found"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    UNSUPPORTED = "unsupported"
    ENGINE_ERROR = "engine_error"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    DEAD_LETTER = "dead_letter"
    QUOTA_EXCEEDED = "quota_exceeded"
    MODEL_CHANGED = "model_changed"
    STREAM_LOST = "stream_lost"


class GatewayCode(StrEnum):
    """Values of `error.code` that an HTTP response may have besides those of a request."""

    ADMIN_KEY_REQUIRED = "admin_key_required"
    BODY_BYTES_EXCEEDED = "body_bytes_exceeded"
    HOST_NOT_ALLOWED = "host_not_allowed"
    IDEMPOTENCY_KEY_REUSED = "idempotency_key_reused"
    INSUFFICIENT_QUOTA = "insufficient_quota"
    INTERNAL_ERROR = "internal_error"
    INVALID_API_KEY = "invalid_api_key"
    INVALID_CURSOR = "invalid_cursor"
    INVALID_FORM = "invalid_form"
    INVALID_JSON = "invalid_json"
    ITEM_NOT_FOUND = "item_not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    NO_FILES = "no_files"
    NOT_CANCELLABLE = "not_cancellable"
    NOT_FOUND = "not_found"
    NOT_IN_BACKGROUND = "not_in_background"
    ORIGIN_NOT_ALLOWED = "origin_not_allowed"
    OTHER_RELEASE = "other_release"
    PREVIOUS_RESPONSE_NOT_FINISHED = "previous_response_not_finished"
    PREVIOUS_RESPONSE_NOT_FOUND = "previous_response_not_found"
    QUEUE_FULL = "queue_full"
    QUEUE_UNAVAILABLE = "queue_unavailable"
    RATE_LIMIT_EXCEEDED = "rate_limit_exceeded"
    REQUEST_TOO_LARGE = "request_too_large"
    RESPONSE_TOO_LARGE = "response_too_large"
    STOPPING = "stopping"
    STORAGE_FULL = "storage_full"
    STORAGE_LIMIT_EXCEEDED = "storage_limit_exceeded"
    STORAGE_UNAVAILABLE = "storage_unavailable"
    STORED_BYTES_EXCEEDED = "stored_bytes_exceeded"
    STREAM_EXPIRED = "stream_expired"
    TOKENIZER_UNAVAILABLE = "tokenizer_unavailable"
    TOO_MANY_BATCHES = "too_many_batches"
    TOO_MANY_READERS = "too_many_readers"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    UNSUPPORTED_VALUE = "unsupported_value"
    UPLOAD_TIMEOUT = "upload_timeout"


class ConnectionCode(StrEnum):
    """Values of `error.code` before the gateway closes a connection. No metric counts them as requests."""

    BODY_TIMEOUT = "body_timeout"
    INVALID_HTTP = "invalid_http"


class BatchCode(StrEnum):
    """Values of `code` for a line of a batch, or in `errors` of a batch, besides those of a request and the gateway."""

    ANSWER_LOST = "answer_lost"
    BATCH_CANCELLED = "batch_cancelled"
    BATCH_EXPIRED = "batch_expired"
    DUPLICATE_CUSTOM_ID = "duplicate_custom_id"
    EMPTY_FILE = "empty_file"
    FILES_LOST = "files_lost"
    INVALID_CUSTOM_ID = "invalid_custom_id"
    INVALID_JSON_LINE = "invalid_json_line"
    INVALID_METHOD = "invalid_method"
    INVALID_URL = "invalid_url"
    LINE_TOO_LARGE = "line_too_large"
    TOO_MANY_TASKS = "too_many_tasks"
    UNREADABLE_ANSWER = "unreadable_answer"
    URL_MISMATCH = "url_mismatch"


FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "expired", "error", "rejected"]
"""How a request ended."""
FINISH_REASONS: Final[tuple[FinishReason, ...]] = get_args(FinishReason)

EngineDeathCause: TypeAlias = Literal["crash", "stall", "out_of_memory", "recompilation"]
"""Why an engine process ended."""

ReturnReason: TypeAlias = Literal[
    "not_ready",
    "redis",
    "drain",
    "cleared",
    "preempted",
    "no_room",
    "engine_given_up",
    "stream_refused",
    "fenced",
    "rolled_back",
    "result_not_stored",
]
"""Why a worker returns a message to the queue. The first six do not count as a delivery; the others do."""

PRIORITY_STEPS: Final = (0, 3, 6, 9)
"""The priorities that have a list in Redis, the most urgent first. kombu rounds all others down to one of these."""


class DeadLetterReason(StrEnum):
    """Reasons of dead letters. In a dead letter, a detail may follow after a colon."""

    UNDECODABLE = "undecodable"
    """The message cannot be decoded."""
    UNDELIVERABLE = "undeliverable"
    """The worker's own code failed on the message."""
    REJECTED = "rejected"
    """The message is not a Headrace request."""
    DUPLICATE = "duplicate"
    """The message is a copy of one that waits or runs."""
    DUPLICATE_ID = "duplicate id"
    """An earlier message had the same request id and other content."""
    DELIVERY_LIMIT = "delivery limit"
    """The message was delivered too often: each time the worker died, or could not complete it."""
    POISON = "poison"
    """The request killed engine processes."""
    TOO_LARGE = "too large"
    """The message exceeds the size limit. The dead letter has only its headers, its id or its beginning."""
    LIST_UNKNOWN = "list unknown"
    """Keys were deleted by hand, so that the message's queue is unknown."""

    @property
    def label(self) -> str:
        """The value of the metrics' label `reason`."""
        return self.replace(" ", "_")

    def saying(self, detail: str) -> str:
        """Return the reason followed by a detail."""
        return f"{self}: {detail}"


DEAD_LETTER_LABELS: Final = tuple(reason.label for reason in DeadLetterReason)
