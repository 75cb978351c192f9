"""Converts token ids to text incrementally, and detects stop strings.

The concatenated text is the part that `decode(prompt + output)` adds to `decode(prompt)`. If the prompt ends within a
character and the output completes it, the output shows the whole character. An incomplete character is held back until
it is complete, turns out to be invalid, or the output ends. An invalid character is shown as U+FFFD, as by `decode`.

The text after k tokens depends only on those k tokens and the parameters. So a request that another worker continues
shows the same characters at the same tokens.
"""

from collections.abc import Sequence
from typing import Final, Protocol

from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.text.token_pieces import REPLACEMENT, Piece, TokenPieces

_LONGEST_BEGINNING: Final = 3
"""Maximum bytes of an incomplete character."""
_CONTEXT_TOKENS: Final = 16


class TextStream(Protocol):
    def step(self, token_id: int) -> str:
        """Add a token. Return the characters that are complete now."""

    def finish(self) -> str:
        """Return the rest of the text. No more tokens will follow."""


def create_text_stream(
    pieces: TokenPieces, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool, join_added_tokens: bool
) -> TextStream:
    """Create a stream that starts after the prompt.

    Args:
        join_added_tokens: put no separator between adjacent added tokens.
    """
    if not pieces.joins:
        return DifferenceStream(pieces, prompt_token_ids, skip_special_tokens=skip_special_tokens)
    return PieceStream(
        pieces,
        prompt_token_ids,
        hidden=pieces.special_token_ids if skip_special_tokens else frozenset(),
        joined=pieces.added_tokens if join_added_tokens else {},
    )


class PieceStream:
    """A stream for decoders that concatenate the pieces of tokens.

    Args:
        hidden: tokens that are not shown.
        joined: added tokens, by id, with the text that is shown after another one of them, without a separator.
    """

    def __init__(
        self, pieces: TokenPieces, prompt_token_ids: Sequence[int], *, hidden: frozenset[int], joined: dict[int, str]
    ) -> None:
        self._pieces = pieces
        self._hidden = hidden
        self._joined = joined
        self._follows_joined = False
        self._is_first = True
        self._beginning = b""
        """The bytes of an incomplete character."""
        end = b""
        for token_id in reversed(prompt_token_ids):
            if token_id in hidden or token_id not in pieces:
                continue
            self._is_first = False
            piece = pieces[token_id]
            end = (piece if isinstance(piece, bytes) else piece.encode()) + end
            if len(end) >= _LONGEST_BEGINNING:
                break
        _, self._beginning = pieces.decode(end[-_LONGEST_BEGINNING:])
        self._num_replaced = pieces.num_replacements(self._beginning)
        """Number of U+FFFD that decoding shows for an incomplete character at the end of the prompt.

        If the character stays invalid, they belong to the prompt and not to the output.
        """

    def step(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        piece = self._pieces[token_id] if not self._is_first else self._take_first(token_id)
        if self._joined:
            piece = self._joined_piece(token_id, piece)
        if not self._beginning and isinstance(piece, str):
            return piece
        return self._decode(piece if isinstance(piece, bytes) else piece.encode())

    def finish(self) -> str:
        return self._decode(b"", final=True) if self._beginning else ""

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        text, self._beginning = self._pieces.decode(self._beginning + data, final=final)
        while self._num_replaced and text.startswith(REPLACEMENT):
            self._num_replaced -= 1
            text = text[1:]
        if text or not self._beginning:
            self._num_replaced = 0
        return text

    def _take_first(self, token_id: int) -> Piece:
        self._is_first = token_id not in self._pieces
        return self._pieces.first(token_id)

    def _joined_piece(self, token_id: int, piece: Piece) -> Piece:
        own = self._joined.get(token_id)
        if own is not None and self._follows_joined:
            piece = own
        self._follows_joined = own is not None
        return piece


class DifferenceStream:
    """A stream for other decoders. The text of a token is the difference between decoding with and without it."""

    def __init__(self, pieces: TokenPieces, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = pieces.tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._token_ids = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        text = self._text()
        self._num_shown = len(text.rstrip(REPLACEMENT))
        self._num_replaced = len(text) - self._num_shown

    def step(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        text = self._text()
        fresh = self._show(text, len(text.rstrip(REPLACEMENT)))
        if len(self._token_ids) >= 2 * _CONTEXT_TOKENS and self._num_shown == len(text):
            self._token_ids = self._token_ids[-_CONTEXT_TOKENS:]
            self._num_shown = len(self._text())
        return fresh

    def finish(self) -> str:
        text = self._text()
        return self._show(text, len(text))

    def _show(self, text: str, end: int) -> str:
        if end <= self._num_shown:
            return ""
        fresh = text[self._num_shown : end]
        self._num_shown = end
        while self._num_replaced and fresh.startswith(REPLACEMENT):
            self._num_replaced -= 1
            fresh = fresh[1:]
        self._num_replaced = 0
        return fresh

    def _text(self) -> str:
        return self._tokenizer.decode(self._token_ids, skip_special_tokens=self._skip_special_tokens)


class Detokenizer(Protocol):
    """The text of one choice."""

    @property
    def text(self) -> str:
        """All text so far."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far, without any tokens after a stop string."""

    def update(self, token_ids: Sequence[int], *, finished: bool) -> tuple[str, str | None]:
        """Add new tokens.

        Args:
            finished: no more tokens will follow, so nothing is held back.

        Returns:
            The new text to show, and the stop string that ended it, if any. In that case the text ends before the stop
            string, or after it with include_stop_str_in_output.
        """


def create_detokenizer(pieces: TokenPieces, prompt_token_ids: Sequence[int], params: SamplingParams) -> Detokenizer:
    if not params.detokenize:
        return NoDetokenizer()
    return IncrementalDetokenizer(pieces, prompt_token_ids, params)


class NoDetokenizer:
    """For requests that want only token ids."""

    text = ""
    num_tokens = 0

    def update(self, token_ids: Sequence[int], *, finished: bool) -> tuple[str, str | None]:  # noqa: ARG002
        return "", None


class IncrementalDetokenizer:
    """Detokenises one token after the other.

    A stop string may start in the last characters of the text. So these are held back: as many as the longest stop
    string has, less one. With include_stop_str_in_output nothing is held back.
    """

    def __init__(self, pieces: TokenPieces, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._stream = create_text_stream(
            pieces,
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            join_added_tokens=not (params.skip_special_tokens or params.spaces_between_special_tokens),
        )
        self._stop = params.stop
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self.num_tokens = 0
        self._num_held_back = max((len(stop) for stop in self._stop), default=1) - 1
        if self._include_stop:
            self._num_held_back = 0
        self._text = ""
        self._num_shown = 0

    @property
    def text(self) -> str:
        return self._text[: self._num_shown]

    def update(self, token_ids: Sequence[int], *, finished: bool) -> tuple[str, str | None]:
        stop: str | None = None
        for token_id in token_ids:
            self.num_tokens += 1
            stop = self._add(self._stream.step(token_id))
            if stop is not None:
                break
        if finished and stop is None:
            stop = self._add(self._stream.finish())
        shown = len(self._text)
        if stop is None and not finished:
            shown = max(self._num_shown, shown - self._num_held_back)
        fresh = self._text[self._num_shown : shown]
        self._num_shown = shown
        return fresh, stop

    def _add(self, text: str) -> str | None:
        """Append text. Return the stop string that ends in it, if any."""
        searched = len(self._text)
        self._text += text
        if not self._stop or self.num_tokens <= self._min_tokens:
            return None
        return self._find_stop(searched)

    def _find_stop(self, searched: int) -> str | None:
        """Cut the text at the stop string that ends first after `searched` characters.

        If several stop strings end at the same place, the first in the list counts, as in vLLM (check_stop_strings).
        """
        found: tuple[int, str] | None = None
        for stop in self._stop:
            at = self._text.find(stop, max(0, searched - len(stop) + 1))
            if at >= 0 and (found is None or at + len(stop) < found[0]):
                found = (at + len(stop), stop)
        if found is None:
            return None
        end, stop = found
        self._text = self._text[: end if self._include_stop else end - len(stop)]
        return stop
