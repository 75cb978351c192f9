"""Token ids to text, one token at a time, and stop strings on the way.

The text shown after k tokens is a function of those k tokens and the parameters alone. So a request that another
worker continues shows the same characters at the same tokens, whatever was held back when the first one died.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from headrace_engine.sampling_params import SamplingParams

# Byte-level and sentence-piece decoders look back at a few tokens to place spaces and complete characters.
_CONTEXT_TOKENS = 8


class Detokenizer(Protocol):
    """The text of one choice."""

    @property
    def text(self) -> str:
        """All text shown so far."""

    @property
    def num_tokens(self) -> int:
        """Tokens taken in; those behind a stop string are not."""

    def update(self, token_ids: Sequence[int], *, finished: bool) -> tuple[str, str | None]:
        """Take new tokens in.

        Args:
            finished: no more tokens will come, so nothing is held back.

        Returns:
            The text that may be shown now and was not before, and the stop string that was met, if any; the text then
            ends before it (or with it, under include_stop_str_in_output).
        """


def create_detokenizer(tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> Detokenizer:
    if not params.detokenize:
        return NoDetokenizer()
    return IncrementalDetokenizer(tokenizer, prompt_token_ids, params)


class NoDetokenizer:
    """For requests that want token ids alone."""

    text = ""
    num_tokens = 0

    def update(self, token_ids: Sequence[int], *, finished: bool) -> tuple[str, str | None]:  # noqa: ARG002
        return "", None


class IncrementalDetokenizer:
    """One token after the other.

    While stop strings are asked for, the last (longest stop string - 1) characters stay hidden until it is certain that
    no stop string begins in them.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = params.skip_special_tokens
        self._special_tokens: dict[int, str] = {}
        """Their own texts, where nothing is to be put between two of them."""
        if not (params.skip_special_tokens or params.spaces_between_special_tokens):
            self._special_tokens = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
        self._after_special_token = False
        self._stream = self._new_stream(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._stop = params.stop
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._num_held_back = max((len(stop) for stop in self._stop), default=1) - 1
        if self._include_stop:
            self._num_held_back = 0
        self._text = ""
        self._num_shown = 0

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def text(self) -> str:
        return self._text[: self._num_shown]

    def update(self, token_ids: Sequence[int], *, finished: bool) -> tuple[str, str | None]:
        stop: str | None = None
        for token_id in token_ids:
            searched = len(self._text)
            self._text += self._step(token_id) if not self._special_tokens else self._step_close(token_id)
            self._num_tokens += 1
            if self._stop and self._num_tokens > self._min_tokens:
                stop = self._find_stop(searched)
                if stop is not None:
                    break
        shown = len(self._text)
        if stop is None and not finished:
            shown = max(self._num_shown, shown - self._num_held_back)
        fresh = self._text[self._num_shown : shown]
        self._num_shown = shown
        return fresh, stop

    def _find_stop(self, searched: int) -> str | None:
        """Cut the text at the earliest stop string that ends behind `searched` characters."""
        found: tuple[int, str] | None = None
        for stop in self._stop:
            at = self._text.find(stop, max(0, searched - len(stop) + 1))
            if at >= 0 and (found is None or at < found[0]):
                found = (at, stop)
        if found is None:
            return None
        at, stop = found
        self._text = self._text[: at + len(stop)] if self._include_stop else self._text[:at]
        return stop

    def _step(self, token_id: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception:  # noqa: BLE001  # the library raises its base class when a decoder contradicts itself
            # The sequence decodes differently with more context (it holds invalid bytes): start anew at this token.
            self._stream = self._new_stream([])
            return self._stream.step(self._tokenizer, token_id) or ""

    def _step_close(self, token_id: int) -> str:
        """As `_step`, but a special token behind another one is its own text and no space."""
        text = self._step(token_id)
        special = self._special_tokens.get(token_id)
        if special is not None and self._after_special_token:
            text = special
        self._after_special_token = special is not None
        return text

    def _new_stream(self, context: Sequence[int]) -> Any:
        return DecodeStream(ids=list(context), skip_special_tokens=self._skip_special_tokens)
