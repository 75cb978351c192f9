"""Compiled kernels: built once, and again where what was kept is damaged or cannot be kept."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import pytest

from headrace_engine.runner import native_library

pytestmark = pytest.mark.torch


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "headrace" / "kernels"


def load() -> ctypes.CDLL:
    library = native_library.load("headrace_engine.runner.fused", "decoder_layers.c")
    assert library.headrace_decoder_layers
    return library


def test_a_kernel_is_built_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load()
    (kept,) = cache.iterdir()
    monkeypatch.setattr(native_library, "_build", None)
    load()
    assert list(cache.iterdir()) == [kept]


@pytest.mark.parametrize("damage", [b"", b"\x7fELF", None], ids=["empty", "cut short", "another byte"])
def test_a_damaged_kernel_is_built_anew(cache: Path, damage: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
    load()
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    kept.unlink()  # what this process has mapped must stay as it is
    kept.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:] if damage is None else damage)
    load()
    assert kept.read_bytes() == whole
    assert "is damaged and built anew" in caplog.text


def test_where_nothing_can_be_kept_a_kernel_is_built_for_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        load()
    assert "compiled kernels cannot be kept" in caplog.text


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [("no-such-compiler", "no C compiler was found"), ("false", "false cannot build decoder_layers.c")],
)
def test_without_a_compiler_the_reason_is_said(
    cache: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, reason: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(OSError, match=reason):
        load()
    assert not list(cache.glob("*")) if cache.exists() else True
