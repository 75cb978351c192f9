"""The settings that the gateway refuses."""

from pathlib import Path
from typing import Any

import pytest

from headrace_gateway import GatewaySettings, GatewaySettingsError


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_without_keys_it_listens_on_loopback(host: str) -> None:
    assert GatewaySettings(host=host).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gateway.example.org", "", "localhost.example.org"])
def test_without_keys_any_other_address_is_refused(host: str) -> None:
    with pytest.raises(GatewaySettingsError, match="host must be a loopback address without a key file"):
        GatewaySettings(host=host)
    assert GatewaySettings(host=host, keys=Path("keys.toml")).host == host


@pytest.mark.parametrize("origin", ["*", "http://localhost:5173", "https://chat.example.org", "http://[::1]:80"])
def test_origins_are_scheme_and_host(origin: str) -> None:
    assert GatewaySettings(allow_origin=(origin,)).allow_origin == (origin,)


@pytest.mark.parametrize("origin", ["", "null", "chat.example.org", "https://a.example/", "https://*.example"])
def test_an_invalid_origin_is_refused(origin: str) -> None:
    with pytest.raises(GatewaySettingsError, match="allow_origin must be"):
        GatewaySettings(allow_origin=(origin,))


@pytest.mark.parametrize("given", [{"max_body_bytes": 0}, {"keep_alive": 0.0}, {"expires": float("nan")}])
def test_sizes_and_times_have_minimum_values(given: dict[str, Any]) -> None:
    with pytest.raises(GatewaySettingsError, match="of at least"):
        GatewaySettings(**given)
