"""Read the streams of a request and produce the chunks of its answer, each with its cursor."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol, TypeAlias

from msgspec import Struct

from headrace_broker import ChunkEvent, EndEvent, StartEvent, StreamEvent, StreamExpiredError
from headrace_broker.stream_hub import StreamHub, Subscription
from headrace_gateway.broker_errors import api_error_of, api_error_of_end
from headrace_gateway.call import ChatForm, CompletionForm, MessageForm, ResponseForm
from headrace_gateway.chat_stream import ChatStream
from headrace_gateway.completion_stream import CompletionStream
from headrace_gateway.cursor import Cursor
from headrace_gateway.envelope import Envelope
from headrace_gateway.errors import ApiError, invalid
from headrace_gateway.message_stream import MessageStream
from headrace_gateway.response_stream import ResponseStream

ChunkAndCursor: TypeAlias = tuple[dict[str, Any], Cursor]
Position: TypeAlias = Cursor | int
"""Where a reader continues: after the chunk with this cursor, or after the event with this sequence number."""
LATE_SECONDS: Final = 60
"""A worker may still end a request this long after its expiry."""


class AnswerStream(Protocol):
    """Turns stream entries into chunks. The chunks depend on the envelope and the entries alone."""

    has_ended: bool
    error: ApiError | None
    """Why the answer is missing or incomplete; None if it is neither."""

    def step(self, request_id: str, event: StreamEvent) -> list[dict[str, Any]]:
        """Return the chunks that a stream entry adds."""


_STREAMS: Final[dict[type[Struct], Callable[[Envelope], AnswerStream]]] = {
    ChatForm: ChatStream,
    CompletionForm: CompletionStream,
    MessageForm: MessageStream,
    ResponseForm: ResponseStream,
}
"""The class that writes the chunks of each form."""


class AnswerReader:
    """Reads one answer for one client. Several readers may read the same answer."""

    def __init__(self, envelope: Envelope, subscription: Subscription, after: Position | None) -> None:
        self._envelope: Final = envelope
        self._subscription: Final = subscription
        self._after: Final = after
        self._has_seen_cursor = not isinstance(after, Cursor)
        self._stream: Final = _STREAMS[type(envelope.form)](envelope)
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
        return sum(self._prompt_tokens.values()) + sum(self._output_tokens.values())

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
        """Return the chunks after the cursor that precede the first entry. Call it once, before `take`."""
        if not isinstance(self._stream, ResponseStream):
            return []
        placed = [(chunk, Cursor(0, 0, number)) for number, chunk in enumerate(self._stream.opening())]
        return [(chunk, cursor) for chunk, cursor in placed if self._is_after(chunk, cursor)]

    async def take(self, timeout: float) -> list[ChunkAndCursor] | None:
        """Return the next chunks after the cursor; None if nothing arrives within `timeout` seconds.

        Raises ApiError if the stream has expired, or if no worker took the request before its deadline.
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
                break
        return chunks

    def _is_after(self, chunk: dict[str, Any], cursor: Cursor) -> bool:
        """Return whether the chunk comes after the reader's cursor. Raises ApiError if no chunk has that cursor."""
        if self._after is None:
            return True
        if isinstance(self._after, int):
            return bool(chunk["sequence_number"] > self._after)
        self._has_seen_cursor |= cursor == self._after
        if cursor > self._after and not self._has_seen_cursor:
            raise invalid(f"this answer has no event with the id {self._after}", code="invalid_cursor")
        return cursor > self._after

    def _check_late(self) -> None:
        if self.begun_at is not None:
            return
        if time.time() > self._envelope.created + self._envelope.expires + LATE_SECONDS:
            raise api_error_of_end("expired", "no worker took the request before it expired")


@asynccontextmanager
async def open_reader(hub: StreamHub, envelope: Envelope, after: Position | None = None) -> AsyncIterator[AnswerReader]:
    """Open the answer at its first entry. Chunks up to the cursor are read, but not returned."""
    async with hub.subscribe(dict.fromkeys(envelope.request_ids, "0-0")) as subscription:
        yield AnswerReader(envelope, subscription, after)
