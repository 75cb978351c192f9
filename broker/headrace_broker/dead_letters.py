"""Messages that no worker will be given again, with the reason. The newest thousand are kept in Redis."""

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgpack

from headrace_broker.keys import DEAD_LETTERS_KEY, PRIORITY_SEPARATOR

if TYPE_CHECKING:
    import redis

DELIVERY_LIMIT: Final = "delivery limit"
DUPLICATE: Final = "duplicate"  # a copy of a message that is being worked on


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One message, byte for byte, and why it is dead."""

    reason: str
    list_name: str
    deliveries: int
    body: bytes = field(repr=False)
    at: float | None = None  # unix seconds by Redis's clock; None in the moment of burial

    @property
    def queue(self) -> str:
        return self.list_name.partition(PRIORITY_SEPARATOR)[0]

    @property
    def request_id(self) -> str | None:
        """The task id, where the message still shows one."""
        try:
            request_id = json.loads(self.body)["headers"]["id"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        return request_id if isinstance(request_id, str) else None


def dead_letters(client: "redis.Redis", limit: int = 100) -> list[DeadLetter]:
    """The newest dead letters first."""
    letters = []
    for packed in client.lrange(DEAD_LETTERS_KEY, 0, limit - 1):
        letter = msgpack.unpackb(packed, raw=True)  # a dead message may be any bytes
        letters.append(
            DeadLetter(
                reason=letter[b"reason"].decode(),
                list_name=letter[b"list"].decode(errors="replace"),
                deliveries=int(letter[b"deliveries"]),
                body=letter[b"body"],
                at=float(letter[b"at"]),
            )
        )
    return letters
