"""An output's text is what decoding gives behind the prompt, with each kind of tokenizer, wherever the prompt ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine import tokenizer_kinds
from engine.tokenizer_kinds import KINDS, TEXTS
from headrace_engine.api.llm_engine import LLMEngine
from headrace_engine.requests.sampling_params import RequestOutputKind, SamplingParams
from headrace_engine.text.detokenizer import Detokenizer, create_detokenizer
from headrace_engine.text.token_pieces import TokenPieces

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
Kind = Callable[[], Tokenizer]
ALL_KINDS = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
BYTE_FALLBACK = [kind for kind in KINDS if "fallback" in kind.__name__ or "bytes" in kind.__name__]


@cache
def pieces_of(kind: Kind) -> TokenPieces:
    return TokenPieces(tokenizer_kinds.add_tokens(kind()))


def encode(kind: Kind, text: str) -> list[int]:
    return pieces_of(kind).tokenizer.encode(text, add_special_tokens=False).ids


def ids_of(kind: Kind, *tokens: str) -> list[int]:
    found = [pieces_of(kind).tokenizer.token_to_id(token) for token in tokens]
    assert None not in found
    return found


def detokenizer(kind: Kind, prompt: list[int], **params: object) -> Detokenizer:
    return create_detokenizer(pieces_of(kind), prompt, SamplingParams(**params))  # type: ignore[arg-type]


def stream(made: Detokenizer, ids: list[int]) -> tuple[list[str], str | None]:
    """What each token shows, and the stop string that ended it."""
    shown = []
    for number, token_id in enumerate(ids, 1):
        text, stop = made.update([token_id], finished=number == len(ids))
        shown.append(text)
        if stop is not None:
            return shown, stop
    return shown, None


def text_behind(kind: Kind, prompt: list[int], output: list[int], *, skip: bool = True) -> str:
    """decode(prompt + output) minus decode(prompt); a character that the output completes belongs to it."""
    decode = pieces_of(kind).tokenizer.decode
    whole = decode(prompt + output, skip_special_tokens=skip)
    return whole[_num_common(decode(prompt, skip_special_tokens=skip), whole) :]


def _num_common(first: str, second: str) -> int:
    return next(
        (at for at, pair in enumerate(zip(first, second, strict=False)) if len(set(pair)) > 1),
        min(len(first), len(second)),
    )


@ALL_KINDS
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("before", [[], [1]])
def test_a_text_cut_anywhere_goes_on_at_the_right_character(kind: Kind, skip: bool, before: list[int]) -> None:
    for text in TEXTS[:-1] if kind in BYTE_FALLBACK else TEXTS:  # a U+FFFD that is cut looks there like any bytes
        ids = [*before, *encode(kind, text)]
        whole = pieces_of(kind).tokenizer.decode(ids, skip_special_tokens=skip)
        for cut in range(len(before), len(ids)):
            shown, _ = stream(detokenizer(kind, ids[:cut], skip_special_tokens=skip), ids[cut:])
            done = _num_whole_characters(kind, ids[:cut], whole, skip=skip)
            assert "".join(shown) == whole[done:], (text, cut)


def _num_whole_characters(kind: Kind, prompt: list[int], whole: str, *, skip: bool) -> int:
    """How many characters of the text lie in the prompt; those of it that are whole, where it ends inside one.

    Decoders show all bytes of a row as U+FFFD where its last character is not whole, so shorter prompts are asked, too.
    """
    decode = pieces_of(kind).tokenizer.decode
    found = 0
    for end in range(len(prompt), max(-1, len(prompt) - 5), -1):
        text = decode(prompt[:end], skip_special_tokens=skip)
        if whole.startswith(text):
            return max(found, len(text))
        found = max(found, _num_common(text, whole))
    return found


WITHOUT_BYTE_TOKENS = [kind for kind in KINDS if kind not in BYTE_FALLBACK]


@pytest.mark.parametrize("kind", WITHOUT_BYTE_TOKENS, ids=lambda kind: kind.__name__)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_tokens_behind_any_prompt_show_what_decoding_both_shows(
    kind: Kind, data: st.DataObject, skip: bool
) -> None:
    size = pieces_of(kind).tokenizer.get_vocab_size()
    ids = st.lists(st.integers(0, size + 2), min_size=1, max_size=12)  # the last ones are no tokens at all
    prompt, output = data.draw(ids), data.draw(ids)
    made = detokenizer(kind, prompt, skip_special_tokens=skip)
    shown, _ = stream(made, output)
    assert "".join(shown) == made.text == text_behind(kind, prompt, output, skip=skip)


@ALL_KINDS
@given(texts=st.tuples(st.text(max_size=12), st.text(min_size=1, max_size=12)))
@settings(max_examples=40, deadline=None)
def test_any_text_behind_any_other_comes_back(kind: Kind, texts: tuple[str, str]) -> None:
    prompt, output = (encode(kind, text.encode(errors="replace").decode()) for text in texts)
    if output:
        shown, _ = stream(detokenizer(kind, prompt), output)
        assert "".join(shown) == text_behind(kind, prompt, output)


@ALL_KINDS
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_resume_behind_any_token_shows_what_was_still_to_come(kind: Kind, data: st.DataObject) -> None:
    size = pieces_of(kind).tokenizer.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=16))
    cut, stop = data.draw(st.integers(0, len(ids) - 1)), data.draw(st.sampled_from([[], ["e"], [REPLACEMENT, "the"]]))
    prompt, output = ids[:cut], ids[cut:]
    shown, stopped = stream(detokenizer(kind, prompt, stop=stop), output)
    for done in range(len(shown)):
        resumed = detokenizer(kind, prompt, stop=stop)
        assert resumed.update(output[:done], finished=False)[0] == "".join(shown[:done])
        assert stream(resumed, output[done:]) == (shown[done:], stopped)


@pytest.mark.parametrize("kind", BYTE_FALLBACK, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("prompt", ["नमस्ते", "မင်္ဂလာပါ", "สวัสดี", "東京都庁前", "🙂🦀🙂"])
def test_an_answer_behind_many_characters_of_bytes_shows_from_its_first_token_on(kind: Kind, prompt: str) -> None:
    prompt_ids = encode(kind, prompt)
    output = encode(kind, prompt + "turns สวัสดี")[len(prompt_ids) :]
    shown, _ = stream(detokenizer(kind, prompt_ids), output)
    assert shown[0] != ""
    assert "".join(shown) == "turns สวัสดี"


def test_a_broken_character_does_not_take_back_whole_ones_before_it() -> None:
    # The library decodes a row of bytes as a whole, to U+FFFD alone; what was streamed stays.
    kind = tokenizer_kinds.byte_fallback
    output = [*encode(kind, "ก")[1:], *ids_of(kind, "<0xE0>", "<0xB8>", "t")]
    shown, _ = stream(detokenizer(kind, encode(kind, "The")), output)
    assert shown == ["", "", "ก", "", "", REPLACEMENT * 2 + "t"]


def test_the_replacement_characters_of_a_prompts_end_are_not_the_answers() -> None:
    fallback = tokenizer_kinds.byte_fallback
    for kind, beginning in (
        (tokenizer_kinds.byte_level, ids_of(tokenizer_kinds.byte_level, "à", "\u00b8")),
        (fallback, ids_of(fallback, "<0xE0>", "<0xB8>")),
    ):
        prompt = [*encode(kind, "The"), *beginning]
        assert stream(detokenizer(kind, prompt), ids_of(kind, "t", "h"))[0] == ["t", "h"]
        assert stream(detokenizer(kind, prompt), ids_of(kind, "t", "h"))[1] is None


@ALL_KINDS
def test_an_output_that_ends_inside_a_character_ends_in_what_decoding_shows(kind: Kind) -> None:
    ids = encode(kind, "wheel 🙂")
    for end in range(2, len(ids) + 1):
        shown, _ = stream(detokenizer(kind, ids[:1]), ids[1:end])
        assert "".join(shown) == text_behind(kind, ids[:1], ids[1:end])


def test_a_real_replacement_character_is_shown_at_once_and_is_a_stop_string() -> None:
    for kind in (tokenizer_kinds.byte_level, tokenizer_kinds.byte_fallback):
        prompt, output = encode(kind, "a"), encode(kind, "a" + REPLACEMENT + "b")[1:]
        shown, _ = stream(detokenizer(kind, prompt), output[:-1])
        assert "".join(shown) == REPLACEMENT
        shown, stop = stream(detokenizer(kind, prompt, stop=[REPLACEMENT]), output)
        assert ("".join(shown), stop, len(shown)) == ("", REPLACEMENT, len(output) - 1)


def test_a_stop_string_ends_with_its_own_token_even_where_that_ends_inside_a_character() -> None:
    kind = tokenizer_kinds.byte_level
    pieces = pieces_of(kind)
    mixed = next(
        token_id
        for token_id in range(pieces.tokenizer.get_vocab_size())
        if isinstance(piece := pieces[token_id], bytes) and piece[0] == ord(" ")
    )
    made = detokenizer(kind, encode(kind, "The"), stop=["l "])
    assert made.update(ids_of(kind, "l"), finished=False) == ("", None)
    assert made.update([mixed], finished=False) == ("", "l ")


def letters(text: str) -> list[int]:
    return [token_id for letter in text for token_id in ids_of(tokenizer_kinds.byte_level, letter)]


@pytest.mark.parametrize(
    ("stop", "met", "text"),
    [
        (["eel", "he"], "he", "w"),  # ends first, though it is named last
        (["wheel", "eel"], "wheel", ""),  # end together: the first of the list
        (["eel", "wheel"], "eel", "wh"),
        (["l", "whee"], "whee", ""),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_of_several_stop_strings_the_one_that_ends_first_counts(
    stop: list[str], met: str, text: str, at_once: bool
) -> None:
    kind = tokenizer_kinds.byte_level
    ids = encode(kind, "wheel") if at_once else letters("wheel")
    shown, found = stream(detokenizer(kind, [1], stop=stop), ids)
    assert ("".join(shown), found) == (text, met)


def test_nothing_stands_between_added_tokens_where_the_request_says_so() -> None:
    for kind in (tokenizer_kinds.word_piece, tokenizer_kinds.words):
        ids = [*ids_of(kind, "<|end|>", "<tool>", "</s>"), *encode(kind, "wheel")]
        prompt = encode(kind, "The")
        apart = stream(detokenizer(kind, prompt, skip_special_tokens=False), ids)[0]
        close = detokenizer(kind, prompt, skip_special_tokens=False, spaces_between_special_tokens=False)
        assert apart == [" <|end|>", " <tool>", " </s>", " wheel"]
        assert stream(close, ids)[0] == [" <|end|>", "<tool>", "</s>", " wheel"]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_a_prompt_that_ends_in_a_replacement_character_is_not_answered_with_itself(
    make_engine: Callable[..., LLMEngine], kind: RequestOutputKind
) -> None:
    engine = make_engine()
    (x,) = engine.tokenizer.encode_plain("x")
    params = SamplingParams(n=2, max_tokens=4, allowed_token_ids=[x], stop=["is"], output_kind=kind)
    engine.add_request("a", "my secret word is \ufffd", params)
    texts: dict[int, list[str]] = {0: [], 1: []}
    while engine.has_unfinished_requests():
        for output in engine.step():
            for choice in output.outputs:
                texts[choice.index].append(choice.text)
                assert choice.stop_reason is None
    for shown in texts.values():
        assert ("".join(shown) if kind is RequestOutputKind.DELTA else shown[-1]) == "xxxx"


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
def test_an_abort_shows_what_was_held_back_for_a_stop_string(
    make_engine: Callable[..., LLMEngine], kind: RequestOutputKind
) -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=50, seed=3, ignore_eos=True, stop=["a stop string" * 9], output_kind=kind)
    engine.add_request("a", "mill", params)
    outputs = [output.outputs[0] for _ in range(12) for output in engine.step()]
    last = engine.abort("a")
    assert last is not None
    outputs.append(last.outputs[0])
    ids = [token_id for output in outputs for token_id in output.token_ids]
    text = "".join(output.text for output in outputs)
    if kind is RequestOutputKind.CUMULATIVE:
        ids, text = outputs[-1].token_ids, outputs[-1].text
    assert len(ids) == 12
    assert text == engine.tokenizer.backend.decode(ids)
    assert len(text) > 10
