"""Where the default model is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_engine import default_model
from headrace_engine.errors import ModelFetchError


def put(place: Path) -> Path:
    """A model in the cache, as far as anybody looks."""
    folder = place / "headrace" / "models" / "bfloat16" / default_model.NAME
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()
    for path in (folder, *folder.parents[:4]):
        path.chmod(0o700)
    return folder


def test_a_model_that_is_there_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = put(tmp_path)
    assert default_model.fetch() == folder


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4])
def test_weights_that_another_user_could_have_put_there_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "runtime").mkdir()
    put(tmp_path / "runtime")
    folder = put(tmp_path / "cache")
    [folder, *folder.parents][at].chmod(0o777)
    told: list[str] = []
    try:
        found = default_model.fetch(progress=told.append)
    except ModelFetchError as error:
        told.append(str(error))
    else:
        assert found == tmp_path / "runtime" / "headrace" / "models" / "bfloat16" / default_model.NAME
    assert "others than its owner may write" in told[0]
