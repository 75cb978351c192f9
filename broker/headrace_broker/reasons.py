"""Codes of failed requests and reasons of dead letters: closed sets that the wire, scripts, metrics and docs share."""

from enum import StrEnum
from typing import Final


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
    """Too many workers died while they held the message."""
    POISON = "poison"
    """The request killed engine processes."""
    TOO_LARGE = "too large"
    """The message exceeds the size limit. The dead letter has only its headers."""
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
