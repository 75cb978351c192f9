"""A text that is far too long is refused by its beginning; none that fits ever is, whatever the tokenizer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from headrace_engine.errors import ContextLengthError
from headrace_engine.text.tokenizer import PromptLength

LIMIT = 64
LONG = 40_000


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    merges = []
    run = "Ġ"  # a space, of which runs become one token
    for _ in range(12):
        merges.append((run, run))
        run += run
        vocabulary[run] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2: SentencePiece's BPE without pre-tokenizer."""
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}, "▁": 257, "a": 258, "▁a": 259}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # type: ignore[assignment]
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##a": 2}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("▁", -2.0)], unk_id=0))
    tokenizer.normalizer = normalizers.NFKC()  # type: ignore[assignment]
    return tokenizer


def with_long_token() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("x" * 2_000, normalized=False)])
    return tokenizer


def with_cleaning() -> Tokenizer:
    """A normaliser that drops what stands between two marks, however far they are apart."""
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Replace(Regex("<.*>"), "")  # type: ignore[assignment]
    return tokenizer


FITTING: list[tuple[Callable[[], Tokenizer], str]] = [
    (byte_level, " " * LONG),
    (byte_fallback, "a" * 60),
    (byte_fallback, " a" * 60),
    (word_piece, "a" * LONG),  # one word of which nothing is known
    (word_piece, " " * LONG),
    (word_piece, "\u0301" * LONG),  # accents, which it drops
    (unigram, "\u00e9" * LONG),  # unknown characters, which become one token
    (with_long_token, "x" * LONG),
    (with_cleaning, "<" + "a" * LONG + ">b"),
]


@pytest.mark.parametrize(("make", "text"), FITTING, ids=lambda value: getattr(value, "__name__", ""))
def test_a_text_that_fits_is_not_refused_however_long_it_is(make: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = make()
    assert len(tokenizer.encode(text).ids) < LIMIT
    PromptLength(tokenizer, LIMIT).check(text)


@pytest.mark.parametrize("make", [byte_level, byte_fallback, word_piece, unigram, with_long_token])
def test_a_text_that_is_far_too_long_is_refused_by_its_beginning(make: Callable[[], Tokenizer]) -> None:
    text = "a b " * 25_000
    with pytest.raises(
        ContextLengthError, match=r"the prompt has 100000 characters, the first \d+ of which are \d+ tokens: .* is 64 "
    ):
        PromptLength(make(), LIMIT).check(text)


def test_a_token_at_the_border_of_what_is_looked_at_is_not_counted_in_parts() -> None:
    tokenizer = with_long_token()
    PromptLength(tokenizer, LIMIT).check("a" * 60 + "x" * LONG)


def test_a_normaliser_that_may_look_ahead_is_given_the_whole_text() -> None:
    PromptLength(with_cleaning(), LIMIT).check("a " * 50_000)
