"""A bad word is forbidden in each form that a tokenizer has for it, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer

from engine import tokenizer_kinds
from engine.tiny_models import TinyModel, load_model_tokenizer
from headrace_engine import LLMEngine, SamplingParams
from headrace_engine.errors import InvalidRequestError
from headrace_engine.text.bad_words import tokenize_bad_words
from headrace_engine.text.tokenizer import ModelTokenizer
from headrace_engine.text.tokenizer_parts import TokenizerParts

Kind = Callable[[], Tokenizer]
BYTE_LEVEL, FALLBACK, METASPACE, KEPT_SPACE, UNIGRAM = (
    tokenizer_kinds.byte_level,
    tokenizer_kinds.byte_fallback,
    tokenizer_kinds.byte_fallback_metaspace,
    tokenizer_kinds.byte_fallback_kept_space,
    tokenizer_kinds.unigram,
)


def forms(kind: Kind, *words: str, vocab_size: int = 100_000) -> set[tuple[str | None, ...]]:
    tokenizer = ModelTokenizer(TokenizerParts(tokenizer_json=kind().to_str().encode(), special_tokens={}))
    found = tokenize_bad_words(tokenizer, words, vocab_size)
    return {tuple(tokenizer.backend.id_to_token(token_id) for token_id in form) for form in found}


@pytest.mark.parametrize(
    ("kind", "word", "expected"),
    [
        (BYTE_LEVEL, "\n", {("Ċ",)}),
        (BYTE_LEVEL, "\t", {("ĉ",)}),
        (BYTE_LEVEL, " ", {("Ġ",)}),
        (BYTE_LEVEL, "  ", {("Ġ", "Ġ")}),
        (BYTE_LEVEL, "\r\n", {("č", "Ċ")}),
        (FALLBACK, "\n", {("<0x0A>",)}),
        (FALLBACK, " ", {("▁",)}),
        (METASPACE, "\n", {("<0x0A>",)}),
        (METASPACE, " ", {("▁",)}),
        (KEPT_SPACE, "\n", {("<0x0A>",)}),
        (KEPT_SPACE, "\t", {("<0x09>",)}),
        (UNIGRAM, "\n", {("\n",)}),
        (UNIGRAM, " ", {("▁",)}),
    ],
)
def test_white_space_is_forbidden_itself(kind: Kind, word: str, expected: set[tuple[str, ...]]) -> None:
    assert forms(kind, word) == expected


@pytest.mark.parametrize("word", ["wheel", " wheel", "   wheel", "\nwheel"])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (BYTE_LEVEL, {("w", "heel"), ("Ġwheel",)}),
        (FALLBACK, {("▁w", "he", "el"), ("w", "he", "el")}),
        (METASPACE, {("▁w", "he", "el"), ("w", "he", "el")}),
        (KEPT_SPACE, {("▁w", "he", "el"), ("w", "he", "el")}),
        (tokenizer_kinds.word_piece, {("wheel",), ("##w", "##he", "##el")}),
        (tokenizer_kinds.words, {("wheel",)}),
    ],
)
def test_a_word_is_forbidden_behind_a_space_and_without_one(
    kind: Kind, expected: set[tuple[str, ...]], word: str
) -> None:
    assert forms(kind, word) == expected


@pytest.mark.parametrize("word", ["\n", " ", "\t \n"])
@pytest.mark.parametrize("kind", [tokenizer_kinds.word_piece, tokenizer_kinds.words])
def test_white_space_that_a_tokenizer_does_not_know_is_refused(kind: Kind, word: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"bad_words\[1\] has no tokens in the model's vocabulary"):
        forms(kind, "the", word)


def test_a_form_that_the_model_cannot_draw_is_left_out() -> None:
    tokenizer = BYTE_LEVEL()
    size = tokenizer.token_to_id("Ġwheel")
    assert size > max(tokenizer.token_to_id("w"), tokenizer.token_to_id("heel"))
    assert forms(BYTE_LEVEL, "wheel", vocab_size=size) == {("w", "heel")}


@pytest.mark.parametrize(("word", "kept"), [("\n", " "), (" ", "\n"), ("\t", " ")])
def test_a_model_goes_on_with_the_other_white_space(
    make_engine: Callable[..., LLMEngine], llama: TinyModel, word: str, kept: str
) -> None:
    tokenizer = load_model_tokenizer(llama.folder)
    (forbidden,), (other,) = tokenizer.encode_plain(word), tokenizer.encode_plain(kept)
    engine = make_engine()
    params = SamplingParams(max_tokens=8, allowed_token_ids=[forbidden, other], bad_words=[word], ignore_eos=True)
    engine.add_request("a", "mill", params)
    texts = [output.outputs[0].text for _ in range(8) for output in engine.step()]
    assert texts[-1] == kept * 8
