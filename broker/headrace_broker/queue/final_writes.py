"""`FinalWrites`: what a request sends when it ends. The script that settles its message makes these writes."""

from dataclasses import dataclass, field
from typing import Any, Final

import redis

from headrace_broker.errors import CallbacksTooLargeError
from headrace_broker.keys import PRIORITY_SEPARATOR, sent_key
from headrace_broker.scripts import script
from headrace_wire.codes import PRIORITY_STEPS

MAX_BYTES: Final = 64 << 20
"""Limit for all values of one request. One script writes them, and the server does nothing else at that time."""
DEAD: Final = "\x06dead"
_MAKE: Final = script("key_checks", "final_writes_prelude", "final_writes")


@dataclass
class FinalWrites:
    """Writes to Redis, in their order. The script makes all of them or none.

    `once` and `claim` are guards: if one fails, the writes that its number counts are skipped.
    """

    writes: list[tuple[str, str, bytes, int]] = field(default_factory=list)
    """Kind, key, value and a number: seconds, or the number of guarded writes."""
    num_bytes: int = 0

    def __len__(self) -> int:
        return len(self.writes)

    def push(self, queue: str, priority: int, message: bytes) -> None:
        """Send a message to a queue, as kombu's Redis transport does with its default steps of priority."""
        step = max(step for step in PRIORITY_STEPS if step <= max(priority, 0))
        self._add("push", f"{queue}{PRIORITY_SEPARATOR}{step}" if step else queue, message)

    def set(self, key: str, value: bytes, seconds: int) -> None:
        """Set a string; for ever if `seconds` is 0."""
        self._add("set", key, value, seconds)

    def delete(self, key: str) -> None:
        self._add("delete", key)

    def answer(self, key: str, value: bytes, seconds: int) -> None:
        """Store and announce the result of a task, unless it has one; for ever if `seconds` is 0."""
        self._add("answer", key, value, seconds)

    def claimed(self, first: int, key: str, token: str) -> None:
        """Guard the writes from the one with the number `first`: they are made unless the key holds another token."""
        self.writes.insert(first, ("claim", key, token.encode(), len(self.writes) - first))

    def cut(self, first: int) -> None:
        """Remove the writes from the one with the number `first`."""
        self.num_bytes -= sum(len(value) for _, _, value, _ in self.writes[first:])
        del self.writes[first:]

    def once(self, request_id: str, content: str, *, is_dead: bool = False) -> None:
        """Guard all writes: they are made once for each request id and content, so not for a copy of its message.

        Those of a dead letter have a guard of their own, as its message may be requeued and then succeed.
        """
        key = sent_key(request_id) + (DEAD if is_dead else "")
        self.writes.insert(0, ("once", key, content.encode(), len(self.writes)))

    def arguments(self) -> tuple[list[str], list[Any]]:
        """Return the keys and the other arguments of a script that declares them like lua/lease_ack.lua."""
        keys = [key for _, key, _, _ in self.writes]
        return keys, [part for kind, _, value, number in self.writes for part in (kind, value, number)]

    def make(self, client: "redis.Redis") -> None:
        """Make the writes now. Redis's errors pass through."""
        keys, arguments = self.arguments()
        _MAKE.bound(client)(*arguments, key=keys)

    def _add(self, kind: str, key: str, value: bytes = b"", number: int = 0) -> None:
        num_bytes = self.num_bytes + len(value)
        if num_bytes > MAX_BYTES:
            raise CallbacksTooLargeError(num_bytes, MAX_BYTES)
        self.num_bytes = num_bytes
        self.writes.append((kind, key, value, number))
