"""Dead letters: messages that no worker gets again, with the reason. Redis keeps the newest thousand of each queue."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final

import msgpack
import redis

from headrace_broker.content import answer_type, shown_encoding, shown_type
from headrace_broker.errors import MalformedMessageError
from headrace_broker.keys import (
    dead_letters_key,
    ended_key,
    engine_losses_key,
    listener_key,
    queue_of,
    result_key,
    stream_key,
)
from headrace_broker.messages import TASK_NAMES
from headrace_broker.queue.message_envelope import body_of, content_digest, legible_envelope, request_id_of
from headrace_broker.results import ErrorInfo
from headrace_broker.scripts import script
from headrace_broker.server.queue_servers import ClientOf, client_of_queue
from headrace_broker.server.shards import id_in_keys
from headrace_broker.server.stream_servers import StreamServers
from headrace_broker.server.stream_table import MAIN
from headrace_wire.codes import DeadLetterReason, ErrorCode

_REQUEUE: Final = script("tenant_prelude", "stream_prelude", "dead_requeue")
_FORGET_RUN: Final = script("stream_prelude", "stream_forget")
_DUPLICATES: Final = (DeadLetterReason.DUPLICATE, DeadLetterReason.DUPLICATE_ID)


@dataclass(frozen=True)
class DeadLetter:
    """One message, byte for byte, and why it is dead."""

    reason: str
    list_name: str
    """Where the message arrived; '' if that is unknown."""
    deliveries: int
    body: bytes = field(repr=False)
    at: float | None = None  # unix seconds by Redis's clock; None in `Leases.on_dead_letter`
    packed: bytes = field(default=b"", repr=False)  # as stored in Redis
    bound_id: str | None = None
    """In `Leases.on_dead_letter`: the request id that was bound to this message; the message may name another one."""
    home: str = ""
    """In `Leases.on_dead_letter`: the stream server of that request; '' if it is the main server."""
    stored_in: str = ""
    """The queue whose dead letters it is among; '' in `Leases.on_dead_letter`."""

    @property
    def letter_id(self) -> str:
        """The id of the dead letter. It exists even if the message has no readable request id."""
        return hashlib.sha1(self.packed, usedforsecurity=False).hexdigest()[:16]

    @property
    def queue(self) -> str:
        return self.stored_in or queue_of(self.list_name)

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
        return content_digest(self._envelope, self.queue) if self._envelope else ""

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

    @property
    def message_body(self) -> bytes | str:
        """The encoded body of the message; '' if it cannot be read."""
        try:
            return body_of(self._envelope)
        except (MalformedMessageError, KeyError, TypeError):
            return ""

    @cached_property
    def _envelope(self) -> dict[str, Any]:
        return legible_envelope(self.body)


def dead_letters(client: "redis.Redis", queue: str, limit: int = 1000) -> list[DeadLetter]:
    """Return up to `limit` dead letters of a queue, the newest first."""
    letters = []
    stored: Any = client.lrange(dead_letters_key(queue), 0, limit - 1)
    for packed in stored:
        try:
            letters.append(_read(packed, queue))
        except Exception as error:  # noqa: BLE001  # an entry written by hand; msgpack's errors have no common base
            reason = f"unreadable letter: {type(error).__name__}"
            letters.append(DeadLetter(reason, "", 0, b"", packed=packed, stored_in=queue))
    return letters


def _read(packed: bytes, queue: str) -> DeadLetter:
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
        stored_in=queue,
    )


def requeue(
    client: "redis.Redis",
    letters: Iterable[DeadLetter],
    queues: "redis.Redis | ClientOf | None" = None,
    streams: StreamServers | None = None,
) -> list[DeadLetter]:
    """Return these messages to their queues, the oldest first, and delete the Redis keys of their first run.

    Returns the letters that were requeued. A letter stays where it is if it

    - is no longer among the dead letters, or does not say which queue it came from;
    - is a copy of a message that waits, is leased or was served;
    - has the request id of another message, whose stream and result would be deleted;
    - is on another server than its stream, and the stream has no end.

    Args:
        client: the server of results, and of streams that are not on another one.
        queues: the server of all queues, or a function that returns the client of a queue's server; without it,
            `client`. If the servers differ, the stream is deleted first, so that a requeue that fails midway can be
            repeated.
        streams: the servers of streams; without them, `client`. They are treated like `client`.
    """
    client_of = client_of_queue(client if queues is None else queues)
    ordered = sorted(letters, key=lambda letter: letter.at or 0.0)
    sent = []
    for letter in ordered:
        if letter.reason in _DUPLICATES or not letter.list_name:
            continue
        request_id = letter.request_id or ""
        keys = _REQUEUE.keys(
            queue=letter.queue,
            list=letter.list_name,
            stream=stream_key(request_id),
            ended=ended_key(request_id),
            result=result_key(request_id),
            engine_losses=engine_losses_key(request_id),
            listener=listener_key(request_id),
        )
        server = client_of(letter.queue)
        run = partial(server.register_script(_REQUEUE.text), keys)
        args: list[Any] = [letter.packed, letter.body, request_id, letter.content]
        homes = {} if streams is None else {streams.of(home): home for home in streams.homes_now(request_id)}
        others = {each: home for each, home in {**homes, client: MAIN}.items() if each is not server}
        if others and not run([*args, 1]):
            continue
        if not all(_forget(each, id_in_keys(home, request_id), letter.content) for each, home in others.items()):
            continue
        if run([*args, 0]):
            sent.append(letter)
    return sent


def _forget(client: "redis.Redis", name: str, content: str) -> bool:
    """Delete the keys of a request's run. Return False if its stream has no end, or belongs to another message.

    `name` is the request's id in the keys of this server.
    """
    forget = _FORGET_RUN.bound(client)
    return bool(
        forget(
            content,
            stream=stream_key(name),
            ended=ended_key(name),
            result=result_key(name),
            engine_losses=engine_losses_key(name),
            listener=listener_key(name),
        )
    )


def purge(client: "redis.Redis | ClientOf", letters: Iterable[DeadLetter]) -> int:
    """Delete these dead letters from the servers of their queues; return how many were still there."""
    client_of = client_of_queue(client)
    removed: list[Any] = [
        client_of(letter.queue).lrem(dead_letters_key(letter.queue), 1, letter.packed)  # type: ignore[arg-type]
        for letter in letters
    ]
    return sum(removed)
