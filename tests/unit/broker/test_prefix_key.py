"""`prefix_key`, by which a caller says which requests begin alike."""

import pytest

from headrace_broker import InvalidRequestError
from headrace_broker.submission import SubmitRequest, prepare


def prefix(**options: object) -> str:
    request: SubmitRequest = {"prompt": "abc", **options}  # type: ignore[typeddict-item]
    return str(prepare(request, default_model="m").headers["prefix"])


def test_requests_of_one_key_have_one_prefix_whatever_their_prompts() -> None:
    assert prefix(prefix_key="a") == prefix(prefix_key="a", prompt="xyz") != prefix(prefix_key="b")


def test_the_same_key_of_another_tenant_is_another_prefix() -> None:
    assert prefix(prefix_key="a", tenant="t") != prefix(prefix_key="a", tenant="u")


def test_a_key_that_is_no_printable_text_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="prefix_key"):
        prefix(prefix_key="")
