"""The gateway's own request headers: valid values, and the error of each invalid one."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from headrace_gateway.errors import ApiError
from headrace_gateway.requests.headers import CallHeaders, read_headers
from headrace_gateway.settings import GatewaySettings


def read(settings: GatewaySettings | None = None, **headers: str) -> CallHeaders:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return read_headers(Headers(named), settings or GatewaySettings())


def test_absent_headers_leave_the_operators_settings() -> None:
    settings = GatewaySettings(expires=50.0, abandon_after=7.0)
    assert read(settings) == CallHeaders(expires=50.0, abandon_after=7.0)
    assert read(GatewaySettings(abandon_after=0.0)).abandon_after is None


@pytest.mark.parametrize(
    ("headers", "name", "value"),
    [
        ({"X_Headrace_Priority": "0"}, "priority", 0),
        ({"X_Headrace_Priority": "9"}, "priority", 9),
        ({"X_Headrace_Expires": "1"}, "expires", 1.0),
        ({"X_Headrace_Expires": "86400"}, "expires", 86400.0),
        ({"X_Headrace_Expires": "1.5"}, "expires", 1.5),
        ({"X_Headrace_Abandon_After": "0"}, "abandon_after", None),
        ({"X_Headrace_Abandon_After": "3600"}, "abandon_after", 3600.0),
        ({"Idempotency_Key": "x" * 100}, "idempotency_key", "x" * 100),
        ({"X_Headrace_Resume": "0"}, "resume", "none"),
        ({"X_Headrace_Resume": "1"}, "resume", "id"),
        ({"X_Headrace_Resume": "ID"}, "resume", "id"),
        ({"X_Headrace_Resume": "chunk"}, "resume", "chunk"),
    ],
)
def test_each_header_is_read(headers: dict[str, str], name: str, value: Any) -> None:
    assert getattr(read(**headers), name) == value


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("x-headrace-priority", ("-1", "10", "1.5", "high", "", "nan")),
        ("x-headrace-expires", ("0", "86401", "inf", "nan", "soon", "1e99")),
        ("x-headrace-abandon-after", ("-1", "0.5", "3601", "nan", "never")),
        ("idempotency-key", ("", "x" * 101, "a\tb", "\x80")),
        ("x-headrace-resume", ("yes", "2", "")),
    ],
)
def test_an_invalid_header_is_reported_by_name(name: str, values: tuple[str, ...]) -> None:
    for value in values:
        with pytest.raises(ApiError) as raised:
            read(**{name: value})
        assert (raised.value.status, raised.value.param, raised.value.code) == (400, name, "invalid_request"), value


def test_one_error_lists_all_problems() -> None:
    with pytest.raises(ApiError) as raised:
        read(x_headrace_priority="x", x_headrace_expires="x", x_headrace_resume="x", idempotency_key="")
    for name in ("priority", "expires", "resume", "idempotency-key"):
        assert name in raised.value.message


_VALUES = st.one_of(
    st.text(st.characters(max_codepoint=255), max_size=20), st.floats().map(str), st.integers().map(str)
)


_NAMES = ("priority", "expires", "abandon-after", "resume")


@given(
    st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("idempotency-key", *(f"x-headrace-{name}" for name in _NAMES)), _VALUES)
    )
)
def test_any_headers_are_read_or_refused(headers: dict[str, str]) -> None:
    try:
        found = read(**headers)
    except ApiError as error:
        status = error.status
    else:
        status = 200
        assert 1 <= found.expires <= 86_400
        assert found.abandon_after is None or 1 <= found.abandon_after <= 3600
        assert found.priority is None or 0 <= found.priority <= 9
    assert status in (200, 400)
