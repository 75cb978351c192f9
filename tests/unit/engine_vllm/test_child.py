"""What the child says when vLLM cannot be used. A package of its name stands for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace_engine.core.process import EngineCoreProcess
from headrace_engine.errors import ConfigError
from headrace_engine.options.engine_args import EngineArgs


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "version.py").write_text('__version__ = "0.32.0"\n')
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv("HEADRACE_ENGINE_ANY_VERSION", raising=False)
    return package


def refusal() -> str:
    process = EngineCoreProcess(EngineArgs(model="m", engine="vllm").create_engine_config())
    try:
        with pytest.raises(ConfigError) as caught:
            process.wait_ready(60)
    finally:
        process.shutdown()
        process.close()
    return str(caught.value)


def test_another_version_is_refused_with_both_numbers(fake_vllm: Path) -> None:
    (fake_vllm / "version.py").write_text('__version__ = "0.28.1+cpu"\n')
    assert "vLLM must be >=0.29,<0.34, got 0.28.1+cpu" in refusal()


def test_a_broken_environment_is_named_with_its_own_words(fake_vllm: Path) -> None:
    (fake_vllm / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    sentence = refusal()
    assert "operator torchvision::nms does not exist" in sentence
    assert "engine_python" in sentence


def test_an_environment_without_vllm_is_told_what_to_install() -> None:
    assert "pip install vllm" in refusal()
