"""`Event`: the content of a webhook. It names an object and contains nothing of the object's text."""

import hashlib
from typing import Final

import msgspec

EVENT_TYPES: Final = (
    "response.completed",
    "response.failed",
    "response.cancelled",
    "response.incomplete",
    "batch.completed",
    "batch.failed",
    "batch.expired",
    "batch.cancelled",
)


class Event(msgspec.Struct, frozen=True):
    """One change of one object."""

    type: str
    """One of EVENT_TYPES."""
    object_id: str
    created_at: int
    """Unix seconds."""
    key: str
    """Name of the API key that owns the object."""
    tenant: str | None

    @property
    def id(self) -> str:
        """Derived from the change, so that repeated publications give one event."""
        return f"evt_{hashlib.blake2b(f'{self.type}/{self.object_id}'.encode(), digest_size=16).hexdigest()}"

    def body(self) -> bytes:
        """Return the JSON that receivers get: the same bytes at each attempt."""
        return msgspec.json.encode(
            {
                "id": self.id,
                "object": "event",
                "created_at": self.created_at,
                "type": self.type,
                "data": {"id": self.object_id},
            }
        )
