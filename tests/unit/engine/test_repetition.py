"""Loops at the end of an output."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headrace_engine.core.stop_check import ends_in_repetition
from headrace_engine.requests.sampling_params import RepetitionDetectionParams


def found(tokens: list[int], longest: int, count: int, shortest: int = 0, start: int = 0) -> bool:
    params = RepetitionDetectionParams(max_pattern_size=longest, min_pattern_size=shortest, min_count=count)
    return ends_in_repetition(tokens, start, params)


@pytest.mark.parametrize(
    ("tokens", "longest", "count", "shortest", "expected"),
    [
        ([1, 2, 1, 2, 1, 2], 2, 3, 0, True),
        ([1, 2, 1, 2, 1, 2], 2, 4, 0, False),
        ([1, 2, 1, 2, 1, 2], 1, 3, 0, False),
        ([1, 2, 1, 2, 1, 2, 9], 2, 3, 0, False),  # the model has left the loop
        ([9, 5, 5, 5], 1, 3, 0, True),
        ([9, 5, 5, 5, 5], 2, 2, 2, True),  # 5 5 is a pattern, too
        ([9, 5, 5, 5], 3, 3, 2, False),  # too short for a pattern of two, three times
        ([1, 2, 3, 1, 2, 3], 5, 2, 0, True),
        ([1, 1], 0, 0, 0, False),  # 0 looks for nothing
    ],
)
def test_a_pattern_of_the_wanted_size_is_found_at_the_end_alone(
    tokens: list[int], longest: int, count: int, shortest: int, expected: bool
) -> None:
    assert found(tokens, longest, count, shortest) is expected


def test_the_prompt_does_not_count() -> None:
    assert found([7, 7, 7, 7], 1, 3, start=1)
    assert not found([7, 7, 7, 7], 1, 3, start=2)


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=24),
    longest=st.integers(1, 8),
    shortest=st.integers(0, 8),
    count=st.integers(2, 4),
)
def test_it_finds_what_comparing_token_by_token_finds(
    tokens: list[int], longest: int, shortest: int, count: int
) -> None:
    assume(shortest <= longest)
    expected = any(
        size * count <= len(tokens)
        and all(tokens[-1 - i] == tokens[-1 - i - m * size] for i in range(size) for m in range(count))
        for size in range(max(shortest, 1), longest + 1)
    )
    assert found(tokens, longest, count, shortest) is expected
