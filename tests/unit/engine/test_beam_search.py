"""Beam search against all sequences there are, over four letters."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest

from headrace_engine.api.beam_search import BeamSearch, BeamSearchParams, BeamSearchSequence, search_together
from headrace_engine.errors import InvalidRequestError
from headrace_engine.requests.outputs import Logprob

EOS = 0
VOCABULARY = range(4)
PROMPT = [1, 2]


def logprobs(tokens: list[int]) -> list[float]:
    """Of what follows: some numbers for every sequence, so that no two sequences are equally likely."""
    draw = random.Random(str(tokens))
    weights = [draw.random() for _ in VOCABULARY]
    return [math.log(weight / sum(weights)) for weight in weights]


def extend(beams: list[list[int]]) -> list[dict[int, Logprob]]:
    return [
        {token: Logprob(logprob=value, rank=1, decoded_token=None) for token, value in enumerate(logprobs(beam))}
        for beam in beams
    ]


def search(params: BeamSearchParams, max_len: int = 100) -> list[BeamSearchSequence]:
    made = BeamSearch(PROMPT, params, [EOS], max_len)
    for _ in range(params.max_tokens):
        if not search_together([made], extend):
            break
    return made.result()


def all_sequences(length: int, *, ignore_eos: bool) -> list[tuple[list[int], float]]:
    """Every output of `length` tokens, or shorter with the end token last, and its log-probability."""
    found = []
    for size in range(1, length + 1):
        for output in itertools.product(VOCABULARY, repeat=size):
            ended = output[-1] == EOS and not ignore_eos
            if (EOS in output[:-1] and not ignore_eos) or (size < length and not ended):
                continue
            tokens = [*PROMPT, *output]
            found.append((tokens, sum(logprobs(tokens[:i])[tokens[i]] for i in range(len(PROMPT), len(tokens)))))
    return found


@pytest.mark.parametrize("ignore_eos", [True, False])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.5, -1.0])
def test_beams_that_hold_everything_find_the_best_of_everything(ignore_eos: bool, length_penalty: float) -> None:
    params = BeamSearchParams(beam_width=64, max_tokens=3, ignore_eos=ignore_eos, length_penalty=length_penalty)

    def score(entry: tuple[list[int], float]) -> float:
        tokens, logprob = entry
        return logprob / (len(tokens) - (tokens[-1] == EOS)) ** length_penalty

    expected = sorted(all_sequences(3, ignore_eos=ignore_eos), key=score, reverse=True)[:64]
    found = search(params)
    assert [sequence.tokens for sequence in found] == [tokens for tokens, _ in expected]
    assert [sequence.cum_logprob for sequence in found] == pytest.approx([logprob for _, logprob in expected])
    ends = {sequence.finish_reason for sequence in found}
    assert ends == ({"length"} if ignore_eos else {"length", "stop"})
    assert all(len(sequence.logprobs) == len(sequence.tokens) - len(PROMPT) for sequence in found)


def test_a_narrow_beam_keeps_its_width() -> None:
    assert len(search(BeamSearchParams(beam_width=2, max_tokens=4))) == 2
    (greedy,) = search(BeamSearchParams(beam_width=1, max_tokens=1, ignore_eos=True))
    assert greedy.tokens[-1] == max(VOCABULARY, key=logprobs(PROMPT).__getitem__)


def test_beams_end_where_the_context_does() -> None:
    found = search(BeamSearchParams(beam_width=4, max_tokens=50, ignore_eos=True), max_len=5)
    assert {(len(sequence.tokens), sequence.finish_reason) for sequence in found} == {(5, "length")}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"beam_width": 0}, "beam_width must be at least 1 and at most 64, got 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1 and at most 2147483647, got 0"),
        ({"temperature": 0.5}, "temperature must be at least 0 and at most 0, got 0.5"),
        ({"length_penalty": math.nan}, "length_penalty must be a finite number, got nan"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false, got 1"),
    ],
)
def test_wrong_parameters_are_refused_with_value_and_limit(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **values})
    assert refused.value.problems == [sentence]
