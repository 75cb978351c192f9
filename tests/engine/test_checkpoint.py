"""Which weights a checkpoint holds, and which failures of a load another try would meet again."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.tiny_models import save_model, save_tokenizer
from headrace_engine.checkpoints.checkpoint import adapter_fingerprint, fingerprint
from headrace_engine.errors import ModelLoadError
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.runner.loader import create_runner
from headrace_engine.runner.models.load_errors import permanent_errors

WEIGHTS = "model.safetensors"
TENSOR = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("llama", folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def split(folder: Path) -> None:
    """Into two files, as larger checkpoints come."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    parts = {"model-1-of-2.safetensors": names[::2], "model-2-of-2.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / file, metadata={"format": "pt"})
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: None,
        lambda folder: change_config(folder, transformers_version="9.9", dtype="bfloat16", _name_or_path="x"),
        lambda folder: (folder / "README.md").write_text("read me"),
        split,
    ],
)
def test_a_copy_of_a_checkpoint_has_its_fingerprint(original: Path, copy: Path, change: Callable[[Path], None]) -> None:
    change(copy)
    assert len(fingerprint(str(original))) == 16
    assert fingerprint(str(copy)) == fingerprint(str(original))


def scale(tensors: dict[str, torch.Tensor]) -> None:
    tensors[TENSOR] *= 1.01


def rename(tensors: dict[str, torch.Tensor]) -> None:
    tensors["another"] = tensors.pop(TENSOR)


def transpose(tensors: dict[str, torch.Tensor]) -> None:
    tensors[TENSOR] = tensors[TENSOR].reshape(tensors[TENSOR].shape[::-1]).contiguous()


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: change_config(folder, rms_norm_eps=0.5),
        *(lambda folder, change=change: change_tensors(folder, change) for change in (scale, rename, transpose)),
    ],
)
def test_other_weights_have_another_fingerprint(original: Path, copy: Path, change: Callable[[Path], None]) -> None:
    change(copy)
    assert fingerprint(str(copy)) not in ("", fingerprint(str(original)))


def test_a_gguf_file_and_an_adapter_have_fingerprints_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(3_000_000))
    before = fingerprint(str(file))
    file.write_bytes(bytes(2_999_999) + b"x")
    assert fingerprint(str(file)) not in ("", before)
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    save_file({"a": torch.ones(4, 4)}, tmp_path / "adapter_model.safetensors")
    before = adapter_fingerprint(str(tmp_path))
    save_file({"a": torch.zeros(4, 4)}, tmp_path / "adapter_model.safetensors")
    assert adapter_fingerprint(str(tmp_path)) not in ("", before)


@pytest.mark.parametrize("content", [b"", b"\xff" * 1000, b"\x02" + bytes(7) + b"[]", b"\x02" + bytes(7) + b"{}"])
def test_files_that_cannot_be_read_have_no_fingerprint(copy: Path, content: bytes) -> None:
    (copy / WEIGHTS).write_bytes(content)
    assert fingerprint(str(copy)) == ""
    assert fingerprint(str(copy / "absent.gguf")) == ""
    assert adapter_fingerprint(str(copy)) == ""


def load(folder: Path) -> Any:
    runner = create_runner(EngineArgs(model=str(folder), device="cpu").create_engine_config())
    return runner.load_model()


def test_a_loaded_model_tells_its_fingerprint(original: Path) -> None:
    assert load(original).weights == fingerprint(str(original))


def cut(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[TENSOR]


def shorten(tensors: dict[str, torch.Tensor]) -> None:
    tensors[TENSOR] = tensors[TENSOR][:-1].contiguous()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (cut, "cannot be loaded: SafetensorError: Error while deserializing header"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b""), "cannot be loaded"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"\xff" * 1000), "cannot be loaded: OverflowError"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"\x05" + bytes(7) + b"[1,2]"), "cannot be loaded"),
        (lambda folder: change_tensors(folder, drop), f"lacks 1 weights, the first is '{TENSOR}'"),
        (lambda folder: change_config(folder, num_hidden_layers=9), "lacks .* weights, the first is 'model.layers.3"),
        (lambda folder: change_tensors(folder, shorten), f"cannot be loaded: tensor '{TENSOR}' has the size"),
        (lambda folder: change_config(folder, vocab_size=5), "cannot be loaded: tensor '.*' has the size"),
        (lambda folder: change_config(folder, hidden_size="x"), "cannot be read: .*hidden_size"),
        (lambda folder: change_config(folder, hidden_size=-4), "cannot be loaded"),
        (lambda folder: change_config(folder, num_attention_heads=7), "cannot be read: .*attention heads"),
        (lambda folder: change_config(folder, model_type="unheard-of"), "cannot be read: .*unheard-of"),
        (lambda folder: ((folder / WEIGHTS).unlink(), (folder / WEIGHTS).mkdir()), "cannot be loaded: .*directory"),
    ],
)
def test_damage_that_stays_is_refused_with_a_sentence(
    copy: Path, damage: Callable[[Path], None], sentence: str
) -> None:
    damage(copy)
    with pytest.raises(ModelLoadError, match=rf"(?s)^model '{copy}' .*{sentence}"):
        load(copy)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no room"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("unable to mmap 12 bytes from file </m>: Cannot allocate memory (12)"),
        RuntimeError("can't start new thread"),
        *(OSError(number, "x") for number in (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOMEM, errno.ETIMEDOUT)),
    ],
)
def test_what_may_pass_is_left_to_the_next_try(error: Exception) -> None:
    with pytest.raises(type(error)), permanent_errors("m", "loaded"):
        raise error
