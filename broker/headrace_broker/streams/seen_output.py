"""`SeenOutput`: what the reader of a stream has received, so that it gets nothing twice.

After the server has lost writes that a reader had read, the next attempt generates them again. It may divide them into
other chunks, for instance with `--publish-interval`.
"""

from array import array
from dataclasses import dataclass, field, replace
from typing import Final

from headrace_broker.streams.events import ChunkEvent, RowsEvent, StreamEvent


class SeenOutput:
    """The output of one stream that its reader has received."""

    def __init__(self) -> None:
        self._rows = 0
        self._choices: Final[dict[int | None, _SeenChoice]] = {}
        """By index; under None the only choice."""
        self._finished: Final[set[int]] = set()
        """The choices whose last chunk has come."""
        self._has_uncounted = False
        """Whether an older worker wrote several choices without `choice_tokens`."""

    def new(self, event: StreamEvent) -> StreamEvent | None:
        """Note an event, and return it without the output that has come before; None if all of it has."""
        if isinstance(event, ChunkEvent):
            return self._new_chunk(event)
        if isinstance(event, RowsEvent):
            return self._new_rows(event)
        return event

    def _new_rows(self, rows: RowsEvent) -> RowsEvent | None:
        known = max(0, self._rows - rows.first)
        if known >= rows.count:
            return None
        self._rows = rows.first + rows.count
        if known == 0:
            return rows
        data = rows.data[known * (len(rows.data) // rows.count) :]
        return replace(rows, first=rows.first + known, count=rows.count - known, data=data)

    def _new_chunk(self, chunk: ChunkEvent) -> ChunkEvent | None:
        if chunk.index in self._finished:
            return None
        if chunk.finish_reason is not None:
            self._finished.add(chunk.index)
        if chunk.choice_tokens is not None:
            key, end = chunk.index, chunk.choice_tokens
        else:
            self._has_uncounted |= chunk.index > 0
            key, end = None, chunk.offset
        if key is None and self._has_uncounted:
            return chunk
        choice = self._choices.get(key)
        if choice is None:
            choice = self._choices[key] = _SeenChoice(end - len(chunk.token_ids))
        return choice.new(chunk, end)


@dataclass(slots=True)
class _SeenChoice:
    first: int
    """Number of tokens before those that this reader has received."""
    characters: "array[int]" = field(default_factory=lambda: array("i", [0]))
    """By number of tokens from `first` on: the characters of their text, -1 inside a chunk."""

    def new(self, chunk: ChunkEvent, end: int) -> ChunkEvent | None:
        """Return the part of a chunk that has not come before; None if there is none.

        Args:
            end: number of tokens of this choice, up to and including the chunk.
        """
        begin = end - len(chunk.token_ids)
        known = self.first + len(self.characters) - 1
        if begin < known:
            return self._cut(chunk, begin, known)
        if begin > known:  # the chunks between were lost before they were read
            self.first, self.characters = begin, array("i", [0])
        self._add(len(chunk.token_ids), len(chunk.text))
        return chunk

    def _add(self, tokens: int, characters: int) -> None:
        characters += self.characters[-1]
        if tokens == 0:
            self.characters[-1] = characters
            return
        if tokens > 1:
            self.characters.extend([-1] * (tokens - 1))
        self.characters.append(characters)

    def _cut(self, chunk: ChunkEvent, begin: int, known: int) -> ChunkEvent | None:
        """Leave out the tokens of a chunk up to the `known` ones, and their text."""
        new = chunk.token_ids[known - begin :]
        before = self.characters[begin - self.first] if begin >= self.first else -1
        if not new and chunk.finish_reason is None and begin >= self.first:
            end = begin - self.first + len(chunk.token_ids)
            if before >= 0 and self.characters[end] < 0:
                self.characters[end] = before + len(chunk.text)
            return None
        if before < 0:  # the reader began inside the chunk, or after it, and cannot tell the known text
            if new:  # with the repeated text, what was counted up to here is of no use
                self.characters = array("i", [-1]) * (len(self.characters) + len(new) - 1)
                self.characters.append(0)
            return chunk
        text = chunk.text[max(0, self.characters[-1] - before) :]
        self._add(len(new), len(text))
        logprobs = chunk.logprobs[known - begin :] if chunk.logprobs is not None else None
        return replace(chunk, token_ids=new, text=text, logprobs=logprobs, prompt_logprobs=None)
