"""A file that is not valid TOML is refused, whatever the parser raises."""

from pathlib import Path

import pytest

from headrace_gateway.errors import GatewaySettingsError
from headrace_gateway.watched_file import WatchedFile, read_toml

UNREADABLE = [b"a = ", b"a = " + b"9" * 5000, b"a = " + b"[" * 100_000, b"a = \xff"]


@pytest.mark.parametrize("content", UNREADABLE, ids=["syntax", "digits", "depth", "bytes"])
def test_a_file_that_the_toml_parser_fails_on_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "keys.toml"
    path.write_bytes(content)
    with pytest.raises(GatewaySettingsError, match="the key file") as refused:
        read_toml("key file", path)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("content", UNREADABLE, ids=["syntax", "digits", "depth", "bytes"])
def test_the_last_valid_version_stays_in_use(tmp_path: Path, content: bytes) -> None:
    path, clock = tmp_path / "keys.toml", [0.0]
    path.write_bytes(b"a = 1")
    watched = WatchedFile("key file", path, lambda file: read_toml("key file", file)[0], now=lambda: clock[0])
    path.write_bytes(content)
    clock[0] = 60.0
    assert watched.content() == {"a": 1}
