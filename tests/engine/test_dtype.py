"""`dtype="auto"`: the checkpoint's own type, unless the processor computes it more slowly than float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from engine.gguf_files import write_model
from engine.model_families import COMMON
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.runner.linear import grouped_linear, packed_linear
from headrace_engine.runner.models.paged_model import PagedModel


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama stored in bfloat16."""
    folder = tmp_path_factory.mktemp("bfloat16")
    config = transformers.LlamaConfig(**COMMON)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("capabilities", "asked", "served"),
    [
        ({"architecture": "x86_64", "avx512_vnni": True}, "auto", "float32"),
        ({"architecture": "x86_64", "avx512_vnni": True}, "bfloat16", "bfloat16"),
        ({"architecture": "x86_64", "avx512_bf16": True}, "auto", "bfloat16"),
        ({"architecture": "x86_64", "amx_bf16": True}, "auto", "bfloat16"),
        ({"architecture": "x86_64", "avx512_bf16": True}, "float32", "float32"),
    ],
)
def test_auto_takes_bfloat16_only_where_the_processor_has_instructions_for_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, object], asked: str, served: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    config = EngineArgs(model=str(checkpoint), dtype=asked).create_engine_config()
    assert PagedModel(config.model, config.cache).info.dtype == served


def test_another_architecture_is_believed_as_oneDNN_describes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "arm64"})
    for supported in (True, False):
        monkeypatch.setattr(packed_linear, "supports", lambda _, supported=supported: supported)
        assert packed_linear.computes_bfloat16() is supported


@pytest.mark.parametrize(("kind", "served"), [("Q4_0", "bfloat16"), ("Q6_K", "bfloat16"), ("F16", "float32")])
def test_auto_takes_bfloat16_for_packed_weights_which_integers_multiply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, served: str
) -> None:
    if not grouped_linear.supported(torch.float32):
        pytest.skip("the kernels need AVX2 or AVX-512")
    monkeypatch.setattr(packed_linear, "computes_bfloat16", lambda: False)
    file = write_model(tmp_path / "tiny.gguf", "llama", lambda name: kind if name.startswith("blk") else "F16")
    config = EngineArgs(model=str(file), skip_tokenizer_init=True).create_engine_config()
    assert PagedModel(config.model, config.cache).info.dtype == served
