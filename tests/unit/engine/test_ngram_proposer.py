"""Prompt lookup: the longest, latest earlier occurrence of the last tokens decides."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace_engine.core.speculation import NgramProposer


def proposed(token_ids: list[int], *, k: int = 3, min_n: int = 1, max_n: int = 3) -> list[int]:
    return NgramProposer(k, min_n, max_n).propose("a", token_ids)


def test_what_followed_the_last_tokens_before_is_proposed() -> None:
    assert proposed([5, 6, 7, 8, 9, 1, 5, 6]) == [7, 8, 9]


def test_the_longest_match_wins_over_a_later_shorter_one() -> None:
    assert proposed([1, 2, 3, 70, 9, 3, 80, 9, 1, 2, 3], k=1) == [70]


def test_of_two_equally_long_matches_the_later_one_wins() -> None:
    assert proposed([1, 2, 70, 1, 2, 80, 1, 2], k=1) == [80]


def test_a_repetition_that_reaches_the_end_is_carried_on() -> None:
    assert proposed([4, 9, 9], k=4) == [9, 9, 9, 9]
    assert proposed([3, 1, 2, 1, 2], k=5) == [1, 2, 1, 2, 1]


def test_nothing_is_proposed_where_fewer_tokens_than_asked_for_match() -> None:
    assert proposed([1, 2, 3, 9, 2, 3], min_n=3) == []
    assert proposed([1, 2, 3]) == []
    assert proposed([1]) == []


def test_bytes_of_two_neighbouring_tokens_are_no_match() -> None:
    # 1 and 2 as little-endian words hold the bytes of 0x2000000 across their border
    assert proposed([1 << 8, 2, 7, 0x02000000 | 1]) == []
    assert proposed([0x01010101, 0x01010101, 0x0101], k=1) == []


def test_requests_are_kept_apart_and_forgotten() -> None:
    proposer = NgramProposer(2, 1, 2)
    assert proposer.propose("a", [1, 2, 3, 1]) == [2, 3]
    assert proposer.propose("b", [1, 5]) == []
    proposer.forget("a")
    assert proposer.propose("a", [9, 8, 9]) == [8, 9]


def slow_proposal(tokens: list[int], k: int, min_n: int, max_n: int) -> list[int]:
    """The definition, word by word."""
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if n < len(tokens) and tokens[start : start + n] == tokens[-n:]:
                longer = list(tokens)
                for index in range(k):
                    longer.append(longer[start + n + index])
                return longer[len(tokens) :]
    return []


@given(
    st.lists(st.sampled_from([0, 1, 256, 65536, 1 << 24, 257]), min_size=1, max_size=40),
    st.lists(st.integers(1, 40), max_size=4).map(sorted),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_it_equals_the_definition_however_the_tokens_arrive(
    tokens: list[int], cuts: list[int], k: int, min_n: int, more: int
) -> None:
    proposer = NgramProposer(k, min_n, min_n + more)
    for cut in cuts:
        proposer.propose("a", tokens[:cut])
    assert proposer.propose("a", tokens) == slow_proposal(tokens, k, min_n, min_n + more)
