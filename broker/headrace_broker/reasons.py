"""Why a request failed and why a message is dead: closed sets, shared by the wire, the scripts, metrics and docs."""

from enum import StrEnum
from typing import Final


class ErrorCode(StrEnum):
    """`error.code` of a stream's end and of a result."""

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


class DeadLetterReason(StrEnum):
    """Why a message is dead, as a dead letter says it; some say more behind a colon."""

    UNDECODABLE = "undecodable"
    """It cannot be read."""
    UNDELIVERABLE = "undeliverable"
    """The worker's own code failed on it."""
    REJECTED = "rejected"
    """It is no request of Headrace."""
    DUPLICATE = "duplicate"
    """It is a copy of a message that waits or runs."""
    DUPLICATE_ID = "duplicate id"
    """Another message came first with its request id."""
    DELIVERY_LIMIT = "delivery limit"
    """Workers died with it too often."""
    POISON = "poison"
    """It killed engines."""
    TOO_LARGE = "too large"
    """It is larger than any request may be; only its headers are kept."""
    LIST_UNKNOWN = "list unknown"
    """Keys were deleted by hand, and nothing tells its queue."""

    @property
    def label(self) -> str:
        """The value of the label `reason` of metrics."""
        return self.replace(" ", "_")

    def saying(self, detail: str) -> str:
        """The reason with what is known beyond it."""
        return f"{self}: {detail}"


DEAD_LETTER_LABELS: Final = tuple(reason.label for reason in DeadLetterReason)
