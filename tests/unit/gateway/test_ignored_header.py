"""The header that names ignored fields is short, whatever a client sends."""

from __future__ import annotations

import pytest

from headrace_gateway.requests.problems import header_of


@pytest.mark.parametrize(
    ("paths", "header"),
    [
        (["a", "messages[].b"], "a, messages[].b"),
        (["3 more", ""], '3%20more, ""'),
        (["a", "x" * 2000, "b"], "a, 2 more"),
        (["\N{GRINNING FACE}" * 200], "1 more"),
        (["x" * 1016], "x" * 1016),
        (["x" * 2000], "1 more"),
    ],
)
def test_names_that_fit_are_followed_by_the_number_of_the_others(paths: list[str], header: str) -> None:
    assert header_of(paths) == header


def test_no_header_is_longer_than_a_kibibyte() -> None:
    for length in range(1, 200, 7):
        for count in range(1, 700, 13):
            paths = [f"{number:0{length}}" for number in range(count)]
            header = header_of(paths)
            assert len(header) <= 1024
            *names, last = header.split(", ")
            num_named = len(names) + (not last.endswith(" more"))
            assert last == f"{count - num_named} more" or num_named == count
