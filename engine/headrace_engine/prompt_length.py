"""`PromptLength`: refuses a far too long text after tokenising only its beginning.

The number of characters does not bound the number of tokens: a token may stand for a paragraph, a normaliser may drop
any character, and a run of unknown characters may become one token. So the beginning is tokenised. Only tokens that the
rest of the text cannot change are counted.
"""

import json

from tokenizers import Tokenizer

from headrace_engine.errors import ContextLengthError

_CHARS_A_TOKEN = 16
_LEAST_CHARS = 1 << 14
# More text may change the boundaries of tokens, but it cannot halve their number.
_TOO_MANY = 2
# For these, the tokens of a beginning do not depend on the rest, except for its last characters.
_LOCAL_NORMALISERS = {
    "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend", "Strip",
    "StripAccents",
}  # fmt: skip


class PromptLength:
    """The check for one tokenizer.

    Args:
        max_tokens: maximum tokens of prompt and output.
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._looked_at = max(_CHARS_A_TOKEN * max_tokens, _LEAST_CHARS)
        added = tokenizer.get_added_tokens_decoder().values()
        self._last_chars = 2 * max((len(token.content) for token in added), default=0) + 1024
        self._is_local = _is_local(json.loads(tokenizer.to_str())["normalizer"])

    def check(self, text: str) -> None:
        """Raise ContextLengthError if the text certainly has too many tokens. Instant for a short text."""
        counted = self._looked_at - self._last_chars
        if not self._is_local or len(text) < 2 * self._looked_at or counted <= 0:
            return
        found = self._tokenizer.encode(text[: self._looked_at], add_special_tokens=False)
        num_tokens = sum(end <= counted for _, end in found.offsets)
        if num_tokens > _TOO_MANY * self._max_tokens:
            raise ContextLengthError(
                f"the prompt has {len(text)} characters, the first {counted} of which are {num_tokens} tokens: "
                f"this model's maximum context length is {self._max_tokens} tokens, prompt and output together"
            )


def _is_local(normaliser: dict[str, object] | None) -> bool:
    if normaliser is None:
        return True
    if normaliser["type"] == "Sequence":
        parts = normaliser["normalizers"]
        assert isinstance(parts, list)
        return all(_is_local(part) for part in parts)
    if normaliser["type"] == "Replace":  # for a fixed text; a regular expression may match up to the end
        pattern = normaliser["pattern"]
        return isinstance(pattern, dict) and isinstance(pattern.get("String"), str) and len(pattern["String"]) < 256
    return normaliser["type"] in _LOCAL_NORMALISERS
