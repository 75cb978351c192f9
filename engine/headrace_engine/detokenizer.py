"""Converts token ids to text incrementally, and detects stop strings.

The concatenated text is what `decode(prompt + output)` adds to `decode(prompt)`. A character that the prompt starts and
the output completes is shown whole. An incomplete character is held back until it is complete, turns out to be invalid,
or the output ends. An invalid one is shown as U+FFFD, as by `decode`.

The text after k tokens depends only on those k tokens and the parameters. So a request that another worker continues
shows the same characters at the same tokens, whatever was held back before.
"""

from collections.abc import Sequence
from typing import Protocol

from headrace_engine.sampling_params import SamplingParams
from headrace_engine.text_stream import create_text_stream
from headrace_engine.token_pieces import TokenPieces


class Detokenizer(Protocol):
    """The text of one choice."""

    @property
    def text(self) -> str:
        """All text so far."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far, without those after a stop string."""

    def update(self, token_ids: Sequence[int], *, finished: bool) -> tuple[str, str | None]:
        """Add new tokens.

        Args:
            finished: no more tokens will follow, so nothing is held back.

        Returns:
            The new text to show, and the stop string that ended it, if any. The text then ends before the stop string,
            or after it with include_stop_str_in_output.
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

    With stop strings, the last (longest stop string - 1) characters are held back until no stop string can start in
    them.
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

        If several end at the same place, the first of the list counts, as in vLLM (check_stop_strings).
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
