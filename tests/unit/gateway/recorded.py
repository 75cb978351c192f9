"""Streams as workers write them, and the answer that a gateway writes of one, however it is read."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st

from headrace_broker import ChunkEvent, EndEvent, StartEvent, StreamEvent, StreamExpiredError, Usage
from headrace_broker.results import ErrorInfo, TokenLogprob
from headrace_gateway.answers.complete_answer import CompleteAnswer
from headrace_gateway.answers.envelope import Envelope
from headrace_gateway.answers.reader import AnswerReader, Cursor, Position
from headrace_gateway.anthropic.endpoints import MESSAGES
from headrace_gateway.chat.endpoints import CHAT
from headrace_gateway.completions.endpoints import COMPLETIONS
from headrace_gateway.requests.call import AnswerOptions
from headrace_gateway.responses.endpoints import RESPONSES

ID = "chatcmpl-" + "0123456789abcdef" * 2
PIECES = ["", " a", "é", "<th", "ink>", "</think>", "\n\n", '{"name": "f", ', '"arguments": {"a": "x"}}', "<tool_call>"]
PIECES += ["</tool_call>", "<", "🙂", "plain text "]
PROMPT = "p1p2p3p4p5"
PROMPT_TOKENS = 5


def envelope_of(options: AnswerOptions) -> Envelope:
    return Envelope(
        id=ID, request_ids=(ID,), created=1, model="tiny", key="anyone", tenant=None, options=options, expires=3600
    )


@st.composite
def entry_lists(draw: st.DrawFn, *, n: int, has_logprobs: bool) -> list[StreamEvent]:
    """Return a whole stream of n choices, with chunks in any order, from one worker or several."""
    attempt = 1
    entries: list[StreamEvent] = [_start(attempt)]
    left = {index: draw(st.integers(1, 5)) for index in range(n)}
    offset = 0
    has_scores = False
    while left:
        if draw(st.integers(0, 9)) == 0:
            attempt += 1  # another worker continues
            entries.append(_start(attempt))
        index = draw(st.sampled_from(sorted(left)))
        left[index] -= 1
        token_ids = draw(st.lists(st.integers(0, 99), min_size=1, max_size=3))
        offset += len(token_ids)
        reason = None
        if not left[index]:
            del left[index]
            reason = draw(st.sampled_from(["stop", "length"]))
        text = "".join(draw(st.lists(st.sampled_from(PIECES), max_size=3)))
        logprobs = [[_logprob(token)] for token in token_ids] if has_logprobs else None
        scores = None
        if index == 0 and not has_scores:  # a prompt's are in the first chunk of choice 0
            scores = [None, *([TokenLogprob(each, -0.5, 1, f"p{each}", f"p{each}".encode())] for each in range(2, 6))]
            has_scores = True
        entries.append(
            ChunkEvent(
                f"{attempt}-{offset}",
                attempt,
                offset,
                index,
                token_ids,
                text,
                logprobs,
                finish_reason=reason,
                prompt_logprobs=scores,
            )
        )
    entries.append(_end(draw(st.sampled_from([None, None, "engine_error", "cancelled"])), attempt, offset))
    return entries


def _start(attempt: int) -> StartEvent:
    return StartEvent(f"{attempt}-0", attempt, worker=f"w{attempt}", prompt_tokens=PROMPT_TOKENS, prompt_tail="")


def _end(code: str | None, attempt: int, offset: int) -> EndEvent:
    error = None if code is None else ErrorInfo(code, "it failed")
    usage = Usage(PROMPT_TOKENS, 0, offset)
    return EndEvent(f"{attempt}-{offset + 1}", attempt, offset, "stop" if code is None else "error", usage, error)


def _logprob(token: int) -> TokenLogprob:
    return TokenLogprob(token, -float("inf") if token == 0 else -0.5, 1, f"t{token}", f"t{token}".encode())


class ReadSoFar:
    """A fake subscription: returns the entries in the given groups, as reads from Redis would."""

    def __init__(self, entries: Sequence[StreamEvent], sizes: Sequence[int]) -> None:
        self._entries = list(entries)
        self._sizes = list(sizes)

    async def take(self, _timeout: float | None) -> list[tuple[str, StreamEvent | StreamExpiredError]]:
        size = self._sizes.pop(0) if self._sizes else len(self._entries)
        taken, self._entries = self._entries[:size], self._entries[size:]
        return [(ID, entry) for entry in taken]


async def read_answer(
    options: AnswerOptions, entries: Sequence[StreamEvent], sizes: Sequence[int] = (), after: Position | None = None
) -> list[tuple[bytes, Cursor]]:
    """Return all chunks after the cursor as bytes, each with its cursor."""
    source: Any = ReadSoFar(entries, sizes)
    envelope = envelope_of(options)
    (api,) = (api for api in (CHAT, COMPLETIONS, MESSAGES, RESPONSES) if isinstance(options, api.options))
    reader = AnswerReader(envelope, api.stream(envelope), source, after)
    written = [(msgspec.json.encode(chunk), cursor) for chunk, cursor in reader.opening()]
    while not reader.has_ended:
        chunks = await reader.take(0)
        assert chunks is not None
        written += [(msgspec.json.encode(chunk), cursor) for chunk, cursor in chunks]
    return written


def joined(chunks: Iterable[dict[str, Any]], options: AnswerOptions) -> dict[str, Any]:
    """Return the answer that is not streamed."""
    answer = CompleteAnswer(options)
    for chunk in chunks:
        answer.add(chunk)
    return answer.whole()
