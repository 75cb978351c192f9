"""Converts bad words to the token sequences by which a model may write them."""

from collections.abc import Sequence
from typing import Final

from headrace_engine.errors import InvalidRequestError
from headrace_engine.text.tokenizer import ModelTokenizer

_ANCHORS: Final = ("a", ",")
"""Texts to put before a word. The first token may merge one of them with the start of the word, but hardly both."""


def tokenize_bad_words(tokenizer: ModelTokenizer, words: Sequence[str], vocab_size: int) -> list[list[int]]:
    """Return the different tokenisations of each word: at the start of a text, after a space, and within a word.

    As in vLLM (SamplingParams.update_from_tokenizer), white space before a word is ignored, unless the word is nothing
    but white space. Sequences with tokens that the model cannot draw are omitted.

    Raises:
        InvalidRequestError: the tokenizer has no token for a word.
    """
    found: list[list[int]] = []
    anchors = [(anchor, tokenizer.encode_plain(anchor)) for anchor in _ANCHORS] if words else []
    for number, word in enumerate(words):
        text = word.lstrip() or word
        forms = [tokenizer.encode_plain(text), tokenizer.encode_plain(f" {text}")]
        for anchor, anchor_ids in anchors:
            token_ids = tokenizer.encode_plain(anchor + text)
            if token_ids[: len(anchor_ids)] == anchor_ids:
                forms.append(token_ids[len(anchor_ids) :])
        forms = [form for form in forms if form]
        if not forms:
            raise InvalidRequestError(f"bad_words[{number}] has no tokens in the model's vocabulary: leave it out")
        found += _shortest([form for form in forms if max(form) < vocab_size])
    return found


def _shortest(forms: Sequence[list[int]]) -> list[list[int]]:
    """Remove each sequence that ends with another one: the shorter one forbids the same last token already."""
    kept: list[list[int]] = []
    for form in sorted(forms, key=len):
        if not any(form[-len(other) :] == other for other in kept):
            kept.append(form)
    return kept
