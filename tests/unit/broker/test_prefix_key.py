"""`prefix_key`: the caller names the requests whose prompts have the same beginning."""

import pytest

from headrace_broker import InvalidRequestError
from headrace_broker.client.submission import SubmitRequest, prepare


def prefix(**options: object) -> str:
    request: SubmitRequest = {"prompt": "abc", **options}  # type: ignore[typeddict-item]
    return str(prepare(request, default_model="m").headers["prefix"])


def test_requests_of_the_same_key_have_the_same_prefix() -> None:
    assert prefix(prefix_key="a") == prefix(prefix_key="a", prompt="xyz") != prefix(prefix_key="b")


def test_the_same_key_of_another_tenant_has_another_prefix() -> None:
    assert prefix(prefix_key="a", tenant="t") != prefix(prefix_key="a", tenant="u")


def test_a_key_that_is_not_printable_text_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="prefix_key"):
        prefix(prefix_key="")
