"""Texts of log-probabilities are vLLM's: candidates differ by text, parts of a character by their bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer

from engine import tokenizer_kinds
from engine.tokenizer_kinds import KINDS, TEXTS
from headrace_engine.api.llm_engine import LLMEngine
from headrace_engine.requests.outputs import Logprob
from headrace_engine.requests.sampling_params import RequestOutputKind, SamplingParams
from headrace_engine.text.logprob_texts import LogprobTexts
from headrace_engine.text.token_pieces import TokenPieces

SENTENCEPIECE = [kind for kind in KINDS if "byte_fallback" in kind.__name__ or "unigram" in kind.__name__]


def read(texts: LogprobTexts, *token_ids: int) -> list[Logprob]:
    """The candidates of one position, of which the first stands there."""
    return list(texts.read([(token_id, -1.0, rank) for rank, token_id in enumerate(token_ids, 1)]).values())


def named(pieces: TokenPieces, *tokens: str) -> list[int]:
    ids = [pieces.tokenizer.token_to_id(token) for token in tokens]
    assert None not in ids
    return ids


@pytest.mark.parametrize("kind", SENTENCEPIECE, ids=lambda kind: kind.__name__)
def test_a_word_and_the_same_behind_a_space_have_different_texts(kind: Callable[[], Tokenizer]) -> None:
    pieces = TokenPieces(kind())
    vocabulary = pieces.tokenizer.get_vocab()
    pairs = [(token, "▁" + token) for token in vocabulary if token and "▁" + token in vocabulary]
    assert pairs
    for pair in pairs:
        plain, spaced = read(LogprobTexts(pieces), *named(pieces, *pair))
        assert (spaced.decoded_token, spaced.bytes) == (f" {plain.decoded_token}", b" " + (plain.bytes or b""))


def test_parts_of_a_word_are_shown_as_the_vocabulary_has_them() -> None:
    pieces = TokenPieces(tokenizer_kinds.word_piece())
    vocabulary = pieces.tokenizer.get_vocab()
    word = next(token for token in vocabulary if token.isalpha() and f"##{token}" in vocabulary)
    part = f"##{word}"
    whole, rest = read(LogprobTexts(pieces), *named(pieces, word, part))
    assert (whole.decoded_token, whole.bytes) == (word, b" " + word.encode())
    assert (rest.decoded_token, rest.bytes) == (part, word.encode())


def test_parts_of_a_character_have_its_text_with_the_last_and_their_own_bytes() -> None:
    pieces = TokenPieces(tokenizer_kinds.byte_fallback())
    texts = LogprobTexts(pieces, prompt_token_ids=named(pieces, "a"))
    found = [
        read(texts, *named(pieces, *tokens))
        for tokens in (("<0xE6>", "a"), ("<0x9D>", "<0x9E>"), ("<0xB1>", "<0xB2>", "a"), ("<0xB1>", "a"))
    ]
    assert [[candidate.decoded_token for candidate in position] for position in found] == [
        ["", "a"],
        ["", ""],
        ["東", "杲", "a"],
        ["", "a"],  # completes nothing
    ]
    assert [position[0].bytes for position in found] == [b"\xe6", b"\x9d", b"\xb1", b"\xb1"]


def test_a_token_that_ends_inside_a_character_leaves_its_text_to_the_next() -> None:
    pieces = TokenPieces(tokenizer_kinds.byte_level())
    mixed = next(
        token_id
        for token_id in range(pieces.tokenizer.get_vocab_size())
        if isinstance(piece := pieces[token_id], bytes) and piece[0] == ord(" ")
    )
    piece = pieces[mixed]
    assert isinstance(piece, bytes)
    character = next(
        whole
        for code in range(0x80, 0x10FFFF)
        if not 0xD800 <= code < 0xE000 and (whole := chr(code)).encode().startswith(piece[1:])
    )
    rest = character.encode()[len(piece) - 1 :]
    alphabet = {pieces[token_id]: token_id for token_id in range(3, 259)}
    texts = LogprobTexts(pieces)
    shown = [read(texts, mixed)[0], *(read(texts, alphabet[bytes([byte])])[0] for byte in rest)]
    assert [logprob.decoded_token for logprob in shown] == [*[""] * len(rest), " " + character]
    assert b"".join(logprob.bytes or b"" for logprob in shown) == b" " + character.encode()


def test_a_real_replacement_character_has_its_text() -> None:
    pieces = TokenPieces(tokenizer_kinds.byte_fallback())
    texts = LogprobTexts(pieces)
    found = [read(texts, *named(pieces, token))[0] for token in ("<0xEF>", "<0xBF>", "<0xBD>")]
    assert [logprob.decoded_token for logprob in found] == ["", "", "\ufffd"]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("text", TEXTS[:-1])
def test_bytes_of_all_tokens_are_the_text(kind: Callable[[], Tokenizer], text: str) -> None:
    pieces = TokenPieces(kind())
    before, *ids = pieces.tokenizer.encode(text, add_special_tokens=False).ids
    texts = LogprobTexts(pieces, prompt_token_ids=[before])
    found = [read(texts, token_id)[0] for token_id in ids]
    if pieces.joins:
        whole, first = (
            pieces.tokenizer.decode(tokens, skip_special_tokens=False) for tokens in ([before, *ids], [before])
        )
        assert (
            b"".join(logprob.bytes or b"" for logprob in found)
            .decode(errors="ignore")
            .endswith(whole.removeprefix(first.rstrip("\ufffd"))[1:])
        )


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_a_request_gets_them_with_its_outputs(make_engine: Callable[..., LLMEngine], kind: RequestOutputKind) -> None:
    engine = make_engine()
    *beginning, last = engine.tokenizer.encode_plain("🦀")
    rest = "🦀".encode()[-1:]
    prompt = [*engine.tokenizer.encode_plain("mill"), *beginning]
    params = SamplingParams(max_tokens=2, allowed_token_ids=[last], logprobs=0, prompt_logprobs=0, output_kind=kind)
    engine.add_request("a", prompt, params)
    text, found, prompt_logprobs = "", [], None
    while engine.has_unfinished_requests():
        for output in engine.step():
            prompt_logprobs = output.prompt_logprobs or prompt_logprobs
            (choice,) = output.outputs
            if kind is RequestOutputKind.DELTA:
                text, found = text + choice.text, [*found, *(choice.logprobs or [])]
            else:
                text, found = choice.text, choice.logprobs or []
    assert text == "🦀\ufffd"
    assert [(entry[last].decoded_token, entry[last].bytes) for entry in found] == [("🦀", rest), ("", rest)]
    assert prompt_logprobs is not None
    entries = [next(iter(entry.values())) for entry in prompt_logprobs if entry is not None]
    assert entries[-1].decoded_token == ""
    assert b"".join(entry.bytes or b"" for entry in entries).endswith("🦀".encode()[:-1])


def test_without_text_there_are_no_texts_and_no_bytes(make_engine: Callable[..., LLMEngine]) -> None:
    engine = make_engine()
    engine.add_request("a", "mill", SamplingParams(max_tokens=1, logprobs=1, prompt_logprobs=0, detokenize=False))
    (output,) = engine.step()
    entries = [*(output.outputs[0].logprobs or []), *(entry for entry in output.prompt_logprobs or [] if entry)]
    assert {(found.decoded_token, found.bytes) for entry in entries for found in entry.values()} == {(None, None)}
