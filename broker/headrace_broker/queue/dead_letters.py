"""Dead letters: messages that no worker gets again, with the reason. Redis keeps the newest thousand."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import msgpack
import redis

from headrace_broker.content import answer_type, shown_encoding, shown_type
from headrace_broker.keys import (
    DEAD_LETTERS_KEY,
    PRIORITY_SEPARATOR,
    ended_key,
    engine_losses_key,
    listener_key,
    result_key,
    stream_key,
)
from headrace_broker.messages import TASK_NAMES
from headrace_broker.queue.message_envelope import content_digest, legible_envelope, request_id_of
from headrace_broker.results import ErrorInfo
from headrace_broker.scripts import script
from headrace_wire.codes import DeadLetterReason, ErrorCode

_REQUEUE: Final = script("tenant_prelude", "stream_prelude", "dead_requeue")
_DUPLICATES: Final = (DeadLetterReason.DUPLICATE, DeadLetterReason.DUPLICATE_ID)


@dataclass(frozen=True)
class DeadLetter:
    """One message, byte for byte, and why it is dead."""

    reason: str
    list_name: str
    deliveries: int
    body: bytes = field(repr=False)
    at: float | None = None  # unix seconds by Redis's clock; None in `Leases.on_dead_letter`
    packed: bytes = field(default=b"", repr=False)  # as stored in Redis
    bound_id: str | None = None
    """In `Leases.on_dead_letter`: the request id that was bound to this message; the message may name another one."""

    @property
    def letter_id(self) -> str:
        """The id of the dead letter. It exists even if the message has no readable request id."""
        return hashlib.sha1(self.packed, usedforsecurity=False).hexdigest()[:16]

    @property
    def queue(self) -> str:
        return self.list_name.partition(PRIORITY_SEPARATOR)[0]

    @property
    def request_id(self) -> str | None:
        """The task id; None if the message has no readable one."""
        return request_id_of(self._envelope)

    @property
    def task(self) -> str | None:
        """The name of the Celery task; None if the message has none of ours."""
        task = self.headers.get("task")
        return task if isinstance(task, str) and task in TASK_NAMES else None

    @property
    def answered_id(self) -> str | None:
        """In `Leases.on_dead_letter`: the request that gets the error; None if its id belongs to another message."""
        is_other = self.reason in _DUPLICATES or self.bound_id != self.request_id
        return None if is_other else self.bound_id

    @property
    def error(self) -> ErrorInfo:
        """The error for its stream and its result."""
        after = f"after {self.deliveries} deliveries" if self.deliveries else "before its first delivery"
        return ErrorInfo(ErrorCode.DEAD_LETTER, f"given up {after}: {self.reason}")

    @property
    def content(self) -> str:
        """The `message_envelope.content_digest` of the message; '' if it cannot be read."""
        return content_digest(self._envelope) if self._envelope else ""

    def summary(self) -> dict[str, Any]:
        """Return the facts about the dead letter, without its message, for people and programs."""
        return {
            "letter_id": self.letter_id,
            "request_id": self.request_id,
            "task": self.task,
            "reason": self.reason,
            "queue": self.queue,
            "deliveries": self.deliveries,
            "at": self.at,
            "bytes": len(self.body),
        }

    @property
    def described(self) -> str:
        """The size and the type of the message, for a log that must not contain its content."""
        found = shown_type(self._envelope.get("content-type")), shown_encoding(self._envelope.get("content-encoding"))
        return f"{len(self.body)} bytes, content-type {found[0]}, content-encoding {found[1]}"

    @property
    def content_type(self) -> str:
        """The content type of a result that the sender can read."""
        return answer_type(self._envelope.get("content-type"))

    @property
    def headers(self) -> dict[str, Any]:
        """The message's headers; empty if they cannot be read. Headers of our client contain no text of the prompt."""
        headers = self._envelope.get("headers")
        return headers if isinstance(headers, dict) else {}

    @cached_property
    def _envelope(self) -> dict[str, Any]:
        return legible_envelope(self.body)


def dead_letters(client: "redis.Redis", limit: int = 1000) -> list[DeadLetter]:
    """Return up to `limit` dead letters, the newest first."""
    letters = []
    stored: Any = client.lrange(DEAD_LETTERS_KEY, 0, limit - 1)
    for packed in stored:
        try:
            letters.append(_read(packed))
        except Exception as error:  # noqa: BLE001  # an entry written by hand; msgpack's errors have no common base
            letters.append(DeadLetter(f"unreadable letter: {type(error).__name__}", "", 0, b"", packed=packed))
    return letters


def _read(packed: bytes) -> DeadLetter:
    letter = msgpack.unpackb(packed, raw=True)  # a dead message may be any bytes
    body = letter[b"body"]
    if not isinstance(body, bytes):
        raise TypeError("the body must be bytes")
    return DeadLetter(
        reason=letter[b"reason"].decode(errors="replace"),
        list_name=letter[b"list"].decode(errors="replace"),
        deliveries=int(letter[b"deliveries"]),
        body=body,
        at=float(letter[b"at"]),
        packed=packed,
    )


def requeue(client: "redis.Redis", letters: Iterable[DeadLetter]) -> list[DeadLetter]:
    """Return these messages to their queues, the oldest first, and delete the Redis keys of their first run.

    Returns the letters that were requeued. A letter stays where it is if it

    - is no longer among the dead letters, or does not say which queue it came from;
    - is a copy of a message that waits, is leased or was served;
    - has the request id of another message, whose stream and result would be deleted.
    """
    run = client.register_script(_REQUEUE.text)
    ordered = sorted(letters, key=lambda letter: letter.at or 0.0)
    sent = []
    for letter in ordered:
        if letter.reason in _DUPLICATES or not letter.list_name:
            continue
        request_id = letter.request_id or ""
        keys = _REQUEUE.keys(
            list=letter.list_name,
            stream=stream_key(request_id),
            ended=ended_key(request_id),
            result=result_key(request_id),
            engine_losses=engine_losses_key(request_id),
            listener=listener_key(request_id),
        )
        if run(keys=keys, args=[letter.packed, letter.body, request_id, letter.content]):
            sent.append(letter)
    return sent


def purge(client: "redis.Redis", letters: Iterable[DeadLetter]) -> int:
    """Delete these dead letters; return how many were still there."""
    removed: list[Any] = [client.lrem(DEAD_LETTERS_KEY, 1, letter.packed) for letter in letters]  # type: ignore[arg-type]
    return sum(removed)
