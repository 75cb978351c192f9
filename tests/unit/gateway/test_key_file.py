"""The key file: its fields, the lookup of keys, and reloading."""

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace_gateway.errors import GatewaySettingsError
from headrace_gateway.keys.api_key import ApiKey
from headrace_gateway.keys.key_file import KeyFile, new_key, read_keys


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def entry(name: str, key: str, *lines: str) -> str:
    return "\n".join(["[[keys]]", f'name = "{name}"', f'sha256 = "{digest(key)}"', *lines, ""])


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    versions = iter(range(1, 1000))

    def write(text: str) -> Path:
        path = tmp_path / "keys.toml"
        path.write_text(text, encoding="utf-8")
        os.utime(path, ns=(0, next(versions) * 10**9))  # a version of its own, however fast the test is
        return path

    return write


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_a_key_has_the_rights_that_the_file_says(write: Callable[[str], Path]) -> None:
    rights = ['tenant = "acme"', "best_priority = 3", 'models = ["tiny", "tiny-lora"]', "admin = true"]
    bounds = ["requests_per_minute = 5", "tokens_per_minute = 70"]
    keys = KeyFile(write(entry("one", "first") + entry("two", "second", *rights, *bounds)))
    assert keys.find(b"first") == ApiKey("one")
    assert keys.find(b"second") == ApiKey("two", "acme", 3, frozenset({"tiny", "tiny-lora"}), True, 5, 70)
    assert keys.find(b"third") is None
    assert keys.find(b"") is None
    assert keys.find(digest("first").encode()) is None


def test_a_name_can_have_two_keys_while_one_is_replaced(write: Callable[[str], Path]) -> None:
    keys = KeyFile(write(f'[[keys]]\nname = "a"\nsha256 = ["{digest("old")}", "{digest("new")}"]\n'))
    assert keys.find(b"old") == keys.find(b"new") == ApiKey("a")


def test_a_new_key_is_found_with_the_entry_that_was_printed(write: Callable[[str], Path]) -> None:
    key, printed = new_key("web", tenant="acme")
    other, _ = new_key("web")
    assert key != other
    assert key not in printed
    assert KeyFile(write(printed)).find(key.encode()) == ApiKey("web", "acme")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", r"has no \[\[keys\]\]"),
        ("keys = 1", "Expected `array`"),
        ("[[keys]", "cannot be used"),
        ('[[keys]]\nname = "a"', "missing required field `sha256`"),
        (entry("a", "x", "priority = 1"), "unknown field `priority`"),
        (entry("a", "x", "best_priority = 10"), "<= 9"),
        (entry("a", "x", "requests_per_minute = 0"), ">= 1"),
        (entry("a b", "x"), "name of key 1 must be"),
        (entry("a", "x") + entry("a", "y"), "two keys have the name a"),
        (entry("a", "x") + entry("b", "x"), "sha256 of b is used twice"),
        ('[[keys]]\nname = "a"\nsha256 = "sk-plain-secret"', "sha256 of a must be 64 characters"),
        ('[[keys]]\nname = "a"\nsha256 = []', "sha256 of a must be 64 characters"),
        (entry("a", "x", 'tenant = "no such\\nname"'), "tenant must be"),
    ],
)
def test_an_invalid_file_is_reported_with_its_problem(write: Callable[[str], Path], text: str, sentence: str) -> None:
    with pytest.raises(GatewaySettingsError, match=sentence) as raised:
        read_keys(write(text))
    assert "plain-secret" not in str(raised.value)


def test_a_missing_file_and_a_binary_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GatewaySettingsError, match="cannot be read: No such file"):
        KeyFile(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(GatewaySettingsError, match="not UTF-8"):
        KeyFile(tmp_path / "binary")


def test_a_changed_file_is_read_again_at_most_once_a_second(write: Callable[[str], Path]) -> None:
    clock = Clock()
    keys = KeyFile(write(entry("one", "first")), now=clock)
    write(entry("two", "second"))
    clock.seconds = 0.9
    assert keys.find(b"first") is not None
    clock.seconds = 1.0
    assert keys.find(b"first") is None
    assert keys.find(b"second") == ApiKey("two")


def test_an_invalid_new_file_is_logged_once_and_the_old_keys_stay(
    write: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    clock, read = Clock(), []
    path = write(entry("one", "first"))
    keys = KeyFile(path, now=clock, when_read=read.append)
    write("[[keys]")
    with caplog.at_level(logging.ERROR):
        for clock.seconds in (1, 2, 3):
            assert keys.find(b"first") == ApiKey("one")
    assert len(caplog.records) == 1
    path.unlink()
    clock.seconds = 4
    assert keys.find(b"first") == ApiKey("one")
    write(entry("two", "second"))
    clock.seconds = 5
    assert keys.find(b"first") is None
    assert read == [True, False, False, True]
