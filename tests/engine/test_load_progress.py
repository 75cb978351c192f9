"""What is logged while real files are loaded, if every line were due at once."""

import logging
from pathlib import Path

import pytest

from engine.gguf_files import write_model
from engine.packed_models import runner_for
from engine.tiny_models import TinyModel
from headrace_engine.system import load_progress


@pytest.fixture(params=["safetensors", "gguf"])
def model(request: pytest.FixtureRequest, llama: TinyModel, tmp_path: Path) -> Path:
    if request.param == "safetensors":
        return Path(llama.folder)
    return write_model(tmp_path / "tiny.gguf", "llama", lambda _: "Q8_0")


def test_the_share_of_the_loaded_weights_grows_to_all(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(load_progress, "_SECONDS", 0.0)
    caplog.set_level(logging.INFO)
    runner_for(model).load_model()
    shares = [getattr(record, load_progress.RECORD_FIELD, None) for record in caplog.records]
    told = [share for share in shares if share is not None]
    assert len(told) > 5
    assert told == sorted(told)
    assert told[0] < 0.5
    assert told[-1] == 1.0
