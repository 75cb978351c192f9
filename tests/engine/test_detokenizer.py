"""Text from tokens, one at a time: whole characters, stop strings, and the same again after a resume."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.model_families import VOCAB_SIZE
from engine.tiny_models import TinyModel
from headrace_engine.requests.sampling_params import SamplingParams
from headrace_engine.text.detokenizer import Detokenizer, create_detokenizer
from headrace_engine.text.token_pieces import TokenPieces

PROMPT = [100, 200, 300]


@pytest.fixture(scope="module")
def tokenizer(llama: TinyModel) -> Tokenizer:
    return Tokenizer.from_file(f"{llama.folder}/tokenizer.json")


def detokenizer(tokenizer: Tokenizer, stop: list[str] | str = (), **params: object) -> Detokenizer:  # type: ignore[assignment]
    return create_detokenizer(TokenPieces(tokenizer), PROMPT, SamplingParams(stop=list(stop) if stop else [], **params))  # type: ignore[arg-type]


def stream(made: Detokenizer, ids: list[int]) -> tuple[list[str], str | None]:
    """What each token shows, and the stop string that ended it."""
    pieces = []
    for index, token_id in enumerate(ids):
        piece, stop = made.update([token_id], finished=index == len(ids) - 1)
        pieces.append(piece)
        if stop is not None:
            return pieces, stop
    return pieces, None


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_the_pieces_add_up_to_the_text(tokenizer: Tokenizer) -> None:
    text = "The wheel turns: Größe, 東京 🙂, and on."
    ids = encode(tokenizer, text)
    made = detokenizer(tokenizer)
    pieces, _ = stream(made, ids)
    assert "".join(pieces) == made.text == text


def test_a_character_of_several_tokens_appears_whole_with_its_last_one(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, "🦀")
    assert len(ids) > 1
    pieces, _ = stream(detokenizer(tokenizer), ids)
    assert pieces == [""] * (len(ids) - 1) + ["🦀"]


@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert "".join(stream(detokenizer(tokenizer), encode(tokenizer, text))[0]) == text


IDS = st.lists(st.integers(3, VOCAB_SIZE - 1), min_size=1, max_size=25)


@given(ids=IDS, stop=st.sampled_from([[], ["e"], ["wheel", " a"], ["xyz", "the"]]), data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_resume_after_any_number_of_tokens_shows_the_same_text(
    tokenizer: Tokenizer, ids: list[int], stop: list[str], data: st.DataObject
) -> None:
    # Random ids: most of them are broken characters, which is the hard case.
    pieces, stopped = stream(detokenizer(tokenizer, stop), ids)
    for k in range(len(pieces)):
        resumed = detokenizer(tokenizer, stop)
        shown, _ = resumed.update(ids[:k], finished=False)
        assert shown == "".join(pieces[:k])
        rest, stopped_again = stream(resumed, ids[k:])
        assert (rest, stopped_again) == (pieces[k:], stopped)


@given(ids=IDS)
@settings(max_examples=60, deadline=None)
def test_tokens_in_one_step_show_what_they_show_one_by_one(tokenizer: Tokenizer, ids: list[int]) -> None:
    one_by_one, _ = stream(detokenizer(tokenizer, ["the"]), ids)
    whole, _ = detokenizer(tokenizer, ["the"]).update(ids, finished=True)
    assert whole == "".join(one_by_one)


def test_a_stop_string_across_tokens_is_cut_and_nothing_of_it_was_ever_shown(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, "The wheel turns")
    made = detokenizer(tokenizer, ["eel tu"])
    pieces, stop = stream(made, ids)
    assert stop == "eel tu"
    assert "".join(pieces) == made.text == "The wh"


def test_a_stop_string_may_be_kept(tokenizer: Tokenizer) -> None:
    made = detokenizer(tokenizer, ["eel tu"], include_stop_str_in_output=True)
    pieces, stop = stream(made, encode(tokenizer, "The wheel turns"))
    assert (stop, "".join(pieces), made.text) == ("eel tu", "The wheel tu", "The wheel tu")


def test_what_might_become_a_stop_string_is_held_back_until_it_cannot(tokenizer: Tokenizer) -> None:
    made = detokenizer(tokenizer, ["abcd"])
    ids = [encode(tokenizer, letter)[0] for letter in "xabcx"]
    assert [made.update([i], finished=False)[0] for i in ids] == ["", "", "", "x", "a"]
    assert made.update([], finished=True) == ("bcx", None)


def test_the_earliest_stop_string_wins(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, "one two three")
    assert detokenizer(tokenizer, ["three", "two"]).update(ids, finished=True) == ("one ", "two")


def test_stop_strings_before_min_tokens_do_not_count(tokenizer: Tokenizer) -> None:
    ids = [encode(tokenizer, letter)[0] for letter in "aXbXc"]
    pieces, stop = stream(detokenizer(tokenizer, ["X"], min_tokens=2), ids)
    assert ("".join(pieces), stop) == ("aXb", "X")


def test_special_tokens_are_hidden_unless_asked_for(tokenizer: Tokenizer) -> None:
    eos = tokenizer.token_to_id("<eos>")
    ids = [*encode(tokenizer, "end"), eos]
    assert "".join(stream(detokenizer(tokenizer), ids)[0]) == "end"
    assert "".join(stream(detokenizer(tokenizer, skip_special_tokens=False), ids)[0]) == "end<eos>"


def test_the_prompt_is_not_shown(tokenizer: Tokenizer) -> None:
    made = create_detokenizer(TokenPieces(tokenizer), encode(tokenizer, "The wheel"), SamplingParams())
    assert made.update(encode(tokenizer, " turns"), finished=True)[0] == " turns"
