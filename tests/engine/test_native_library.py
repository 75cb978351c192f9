"""Compiled kernels: built once, again where what was kept is damaged, and kept where nobody else can write."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace_engine.runner.native import native_library

pytestmark = pytest.mark.rotated("engine/headrace_engine/runner/native")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "headrace" / "kernels"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the kernels are kept when the cache will not do."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    return tmp_path / "runtime" / "headrace" / "kernels"


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


def test_processes_that_start_together_build_a_kernel_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    build, all_started = native_library._build, threading.Barrier(4)

    def counted(name: str, *rest: Any) -> Path:
        built.append(name)
        return build(name, *rest)

    def start() -> None:
        all_started.wait()
        load()

    monkeypatch.setattr(native_library, "_build", counted)
    threads = [threading.Thread(target=start) for _ in range(4)]  # each opens the folder by itself, as a process does
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert len(list(cache.iterdir())) == 1


def test_a_stopped_process_that_holds_the_lock_does_not_stop_a_start(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(native_library, "_LONGEST_BUILD_SECONDS", 0.3)
    holder = os.open(cache, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    try:
        load()
    finally:
        os.close(holder)
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("damage", [b"", b"\x7fELF", None], ids=["empty", "cut short", "another byte"])
def test_a_damaged_kernel_is_built_anew(cache: Path, damage: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
    load()
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    kept.unlink()  # what this process has mapped must stay as it is
    kept.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:] if damage is None else damage)
    load()
    assert kept.read_bytes() == whole
    assert "is damaged and rebuilt" in caplog.text


def test_the_folder_and_the_file_are_for_this_user_alone(cache: Path) -> None:
    before = os.umask(0)  # the most careless one
    try:
        load()
    finally:
        os.umask(before)
    (kept,) = cache.iterdir()
    for path in (kept, cache, cache.parent, cache.parent.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


@pytest.fixture
def another_user() -> None:
    if os.geteuid():
        pytest.skip("only root can give a file to somebody else")


def foreign_link(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    cache.parent.parent.mkdir()
    cache.parent.symlink_to(tmp_path / "real")
    os.lchown(cache.parent, 65534, 65534)


def broad_target(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "broad").mkdir()
    (tmp_path / "broad" / "real").mkdir(mode=0o700)
    (tmp_path / "broad").chmod(0o777)
    cache.parent.parent.mkdir()
    cache.parent.symlink_to(tmp_path / "broad" / "real")


def folder_of(mode: int, owner: int | None = None, *, at: int) -> Callable[[Path, Path], None]:
    """The folder of the kernels, or with `at` one so far above it, as somebody has prepared it."""

    def prepare(cache: Path, _tmp_path: Path) -> None:
        cache.mkdir(parents=True, mode=0o700)
        folder = [cache, *cache.parents][at]
        folder.chmod(mode)
        if owner is not None:
            os.chown(folder, owner, owner)

    return prepare


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (folder_of(0o770, at=0), "others than its owner may write"),
        (folder_of(0o707, at=0), "others than its owner may write"),
        (folder_of(0o1777, at=0), "others than its owner may write"),
        (folder_of(0o777, at=1), "others than its owner may write"),
        (folder_of(0o720, at=2), "others than its owner may write"),
        (folder_of(0o700, 65534, at=0), "belongs to user 65534"),
        (folder_of(0o700, 65534, at=2), "belongs to user 65534"),
        (foreign_link, "belongs to user 65534"),
        (broad_target, "others than its owner may write"),
    ],
)
def test_where_another_user_could_put_a_kernel_none_is_taken_and_another_folder_is_used(
    cache: Path,
    elsewhere: Path,
    tmp_path: Path,
    another_user: None,
    prepare: Callable[[Path, Path], None],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prepare(cache, tmp_path)
    load()
    assert list(cache.iterdir() if cache.exists() else []) == []
    assert [path.suffix for path in elsewhere.iterdir()] == [".so"]
    assert f"compiled kernels are cached in {elsewhere} instead of {cache}" in caplog.text
    assert reason in caplog.text


@pytest.mark.parametrize("prepare", [lambda kept: kept.chmod(0o770), lambda kept: os.chown(kept, 65534, 65534)])
def test_a_kernel_that_another_user_could_have_written_is_built_anew(
    cache: Path, another_user: None, prepare: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    load()
    (kept,) = cache.iterdir()
    before = kept.stat().st_ino
    prepare(kept)
    load()
    (kept,) = cache.iterdir()
    assert (kept.stat().st_uid, stat.S_IMODE(kept.stat().st_mode)) == (os.geteuid(), 0o700)
    assert kept.stat().st_ino != before
    assert "a compiled kernel is rebuilt" in caplog.text


def test_a_kernel_that_is_a_link_is_built_anew(cache: Path, tmp_path: Path) -> None:
    load()
    (kept,) = cache.iterdir()
    kept.rename(tmp_path / "planted.so")
    kept.symlink_to(tmp_path / "planted.so")
    load()
    assert not kept.is_symlink()


def test_where_the_caches_disk_is_full_a_kernel_is_kept_elsewhere(
    cache: Path,
    elsewhere: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiler = tmp_path / "cc"  # which finds no room in the cache
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *{cache}*) echo "ld: final link failed: No space left on device" >&2; exit 1;; esac\n'
        'exec cc "$@"\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    load()
    assert list(cache.iterdir()) == []
    (kept,) = elsewhere.iterdir()
    assert f"compiled kernels are cached in {elsewhere} instead of {cache}: {cache}: [Errno 28] No space" in caplog.text
    monkeypatch.setattr(native_library, "_build", None)
    load()  # the next start takes it from there
    assert list(elsewhere.iterdir()) == [kept]


def test_where_nothing_can_be_kept_a_kernel_is_built_for_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(native_library, "candidates", lambda name: iter([tmp_path / "file" / name]))
    with caplog.at_level(logging.WARNING):
        load()
    assert "compiled kernels cannot be cached, so every start builds them" in caplog.text


def test_where_files_must_not_run_a_kernel_is_loaded_from_memory(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[str] = []

    def refuse_files(path: str) -> ctypes.CDLL:  # as a file system that is mounted noexec does
        paths.append(path)
        if not path.startswith("/proc/self/fd/"):
            raise OSError(f"{path}: failed to map segment from shared object")
        return whole(path)

    whole = ctypes.CDLL
    monkeypatch.setattr(native_library.ctypes, "CDLL", refuse_files)
    assert load()
    assert len(paths) == 2


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
    assert not list(cache.glob("*")) if cache.exists() else True  # and nowhere else: it would fail there, too
