"""Where the default model is kept."""

from __future__ import annotations

import errno
import os
import stat
import venv
from pathlib import Path

import pytest

from headrace_engine.checkpoints import default_model
from headrace_engine.errors import ModelFetchError


def put(place: Path, name: str = "headrace") -> Path:
    """A model in the cache, as far as anybody looks."""
    folder = place / name / "models" / "bfloat16" / default_model.NAME
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()
    for path in (folder, *folder.parents[:4]):
        path.chmod(0o700)
    return folder


def test_a_model_that_is_there_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = put(tmp_path)
    assert default_model.fetch() == folder


def test_a_container_can_mount_the_model_and_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(python: str, gguf: Path, target: Path, dtype: str) -> None:
        target.mkdir(mode=0o700)
        (target / "model.safetensors").touch(mode=0o600)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(default_model, "_download", lambda scratch: scratch)
    monkeypatch.setattr(default_model, "_convert_in_child", convert)
    for _ in ("converted", "found in the cache"):
        folder = default_model.fetch()
        assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())] == [0o755, 0o644]
        (folder / "model.safetensors").chmod(0o600)  # as an older version has left it


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4])
def test_weights_that_another_user_could_have_put_there_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "cache").mkdir()
    other = put(tmp_path / "temporary", f"headrace-{os.geteuid()}")
    folder = put(tmp_path / "cache")
    [folder, *folder.parents][at].chmod(0o777)
    told: list[str] = []
    try:
        found = default_model.fetch(progress=told.append)
    except ModelFetchError as error:
        told.append(str(error))
    else:
        assert found == other
    assert "others than its owner may write" in told[0]


def test_a_runtime_folder_is_no_place_for_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    put(tmp_path / "runtime")
    folder = put(tmp_path / "temporary", f"headrace-{os.geteuid()}")
    assert default_model.fetch() == folder


@pytest.mark.parametrize("step", ["_download", "_convert_in_child"])
def test_a_full_disk_is_told_at_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(default_model, "_download", lambda scratch: scratch)
    monkeypatch.setattr(default_model, step, fail)
    with pytest.raises(ModelFetchError, match=r"cannot be kept: .*No space left on device; XDG_CACHE_HOME names"):
        default_model.fetch()


def test_nothing_is_fetched_that_cannot_be_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    venv.create(tmp_path / "bare", with_pip=False)
    python = str(tmp_path / "bare/bin/python")
    told: list[str] = []
    with pytest.raises(ModelFetchError, match=rf"is converted by accelerate, gguf, torch.*, which {python} has not: "):
        default_model.fetch(progress=told.append, python=python)
    with pytest.raises(ModelFetchError, match="/no/python is not a usable Python interpreter"):
        default_model.fetch(progress=told.append, python="/no/python")
    assert told == []


def test_an_interpreter_without_headrace_can_convert_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "packages").mkdir()
    for name in ("accelerate", "gguf", "torch", "transformers", "tokenizers"):
        (tmp_path / "packages" / f"{name}.py").write_text("")
    (tmp_path / "packages/tokenizers.py").write_text("pre_tokenizers = None")
    (tmp_path / "packages/transformers.py").write_text("raise SystemExit('converted without Headrace')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    monkeypatch.setattr(default_model, "_download", lambda scratch: scratch / "model.gguf")
    venv.create(tmp_path / "bare", with_pip=False)
    with pytest.raises(ModelFetchError, match="converted without Headrace"):
        default_model.fetch(progress=lambda _: None, python=str(tmp_path / "bare/bin/python"))
