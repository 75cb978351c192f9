"""Read the streams of a request and produce the chunks of its answer, each with its cursor."""

import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple, Self, TypeAlias

from headrace_broker import ChunkEvent, EndEvent, StartEvent, StreamEvent, StreamExpiredError
from headrace_broker.streams.hub import StreamHub, Subscription
from headrace_gateway.answers.envelope import Envelope
from headrace_gateway.errors import ApiError, invalid
from headrace_gateway.http.broker_errors import api_error_of, api_error_of_end
from headrace_wire.codes import GatewayCode

CURSOR_PATTERN: Final = r"([0-9]{1,19})-([0-9]{1,19})\.([0-9]{1,9})"
_CURSOR: Final = re.compile(CURSOR_PATTERN)


class Cursor(NamedTuple):
    """The position of a reader in a stream: `<entry id>.<k>`, the k-th chunk of a stream entry, k from 0."""

    attempt: int
    offset: int
    chunk: int

    @classmethod
    def parse(cls, text: str, *, param: str) -> Self:
        """Parse a cursor. Raises ApiError 400 for a text that is not one."""
        found = _CURSOR.fullmatch(text)
        if found is None:
            raise invalid(
                f"{param} must be an event's id, such as 1-12.0, got {text[:40]!r}",
                code=GatewayCode.INVALID_CURSOR,
                param=param,
            )
        return cls(*map(int, found.groups()))

    @classmethod
    def of(cls, entry_id: str, chunk: int) -> Self:
        attempt, _, offset = entry_id.partition("-")
        return cls(int(attempt), int(offset), chunk)

    def __str__(self) -> str:
        return f"{self.attempt}-{self.offset}.{self.chunk}"


class AnswerStream(ABC):
    """Turns the entries of a request's streams into chunks. These depend on the envelope and the entries alone.

    So every replica produces the same chunks, however many entries it reads at a time.
    """

    has_ended = False
    error: ApiError | None = None
    """Why the answer is missing or incomplete; None if it is neither."""

    def opening(self) -> list[dict[str, Any]]:
        """Return the chunks that precede the first entry."""
        return []

    @abstractmethod
    def step(self, request_id: str, event: StreamEvent) -> list[dict[str, Any]]:
        """Return the chunks that a stream entry adds."""


ChunkAndCursor: TypeAlias = tuple[dict[str, Any], Cursor]
Position: TypeAlias = Cursor | int
"""Where a reader continues: after the chunk with this cursor, or after the event with this sequence number."""
LATE_SECONDS: Final = 60
"""A worker may still end a request this long after its expiry."""


class AnswerReader:
    """Reads one answer for one client. Several readers may read the same answer."""

    def __init__(
        self, envelope: Envelope, stream: AnswerStream, subscription: Subscription, after: Position | None
    ) -> None:
        self._envelope: Final = envelope
        self._subscription: Final = subscription
        self._after: Final = after
        self._has_seen_cursor = after is None
        self._stream: Final = stream
        self.begun_at: float | None = None
        """Monotonic time at which the first entry arrived."""
        self.has_output = False
        """Whether a worker has written any output."""
        self._prompt_tokens: Final[dict[str, int]] = {}
        self._output_tokens: Final[dict[str, int]] = {}

    @property
    def has_ended(self) -> bool:
        return self._stream.has_ended

    @property
    def error(self) -> ApiError | None:
        """Why the request failed; None while it has not."""
        return self._stream.error

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens read so far, over all prompts and choices."""
        return sum(self._prompt_tokens.values()) + self.num_output_tokens

    @property
    def num_output_tokens(self) -> int:
        """Output tokens read so far, over all prompts and choices."""
        return sum(self._output_tokens.values())

    def _count(self, request_id: str, event: StreamEvent) -> None:
        if isinstance(event, StartEvent):
            self._prompt_tokens[request_id] = event.prompt_tokens or 0
        elif isinstance(event, ChunkEvent):
            self.has_output = True
            self._output_tokens[request_id] = event.offset
        elif isinstance(event, EndEvent) and event.usage is not None:
            self._prompt_tokens[request_id] = event.usage.prompt_tokens
            self._output_tokens[request_id] = event.usage.completion_tokens

    def opening(self) -> list[ChunkAndCursor]:
        """Return the chunks before the first entry that follow the cursor. Call it once, before `take`."""
        placed = [(chunk, Cursor(0, 0, number)) for number, chunk in enumerate(self._stream.opening())]
        return [(chunk, cursor) for chunk, cursor in placed if self._is_after(chunk, cursor)]

    async def take(self, timeout: float) -> list[ChunkAndCursor] | None:
        """Return the next chunks after the cursor; None if nothing arrives within `timeout` seconds.

        Raises ApiError if the stream has expired, if it ends before the cursor, or if no worker took the request before
        its deadline.
        """
        events = await self._subscription.take(timeout)
        if not events:
            self._check_late()
            return None
        self.begun_at = time.monotonic() if self.begun_at is None else self.begun_at
        chunks: list[ChunkAndCursor] = []
        for request_id, event in events:
            if isinstance(event, StreamExpiredError):
                raise api_error_of(event)
            self._count(request_id, event)
            for number, chunk in enumerate(self._stream.step(request_id, event)):
                cursor = Cursor.of(event.entry_id, number)
                if self._is_after(chunk, cursor):
                    chunks.append((chunk, cursor))
            if self._stream.has_ended:
                if not self._has_seen_cursor:
                    raise self._no_such_event()
                break
        return chunks

    def _is_after(self, chunk: dict[str, Any], cursor: Cursor) -> bool:
        """Return whether the chunk comes after the reader's cursor. Raises ApiError if no chunk has that cursor."""
        if self._after is None:
            return True
        if isinstance(self._after, int):
            self._has_seen_cursor |= chunk["sequence_number"] >= self._after
            return bool(chunk["sequence_number"] > self._after)
        self._has_seen_cursor |= cursor == self._after
        if cursor > self._after and not self._has_seen_cursor:
            raise self._no_such_event()
        return cursor > self._after

    def _no_such_event(self) -> ApiError:
        return invalid(f"this answer has no event with the id {self._after}", code=GatewayCode.INVALID_CURSOR)

    def _check_late(self) -> None:
        if self.begun_at is not None:
            return
        if time.time() > self._envelope.created + self._envelope.expires + LATE_SECONDS:
            raise api_error_of_end("expired", "no worker took the request before it expired")


@asynccontextmanager
async def open_reader(
    hub: StreamHub, envelope: Envelope, stream: AnswerStream, after: Position | None = None
) -> AsyncIterator[AnswerReader]:
    """Open the answer at its first entry. Chunks up to the cursor are read, but not returned.

    Args:
        stream: a new AnswerStream for the envelope.
    """
    async with hub.subscribe(dict.fromkeys(envelope.request_ids, "0-0")) as subscription:
        yield AnswerReader(envelope, stream, subscription, after)
