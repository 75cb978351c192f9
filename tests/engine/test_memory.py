"""A model is refused before it fills the machine, and its weights are held once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from engine.gguf_files import write_model
from engine.model_families import COMMON
from headrace_engine.core.engine_core import EngineCore
from headrace_engine.core.runner_factory import create_runner
from headrace_engine.errors import ConfigError
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.runner.memory import available_memory
from headrace_engine.runner.models.weight_memory import weight_bytes

pytestmark = pytest.mark.rotated(
    "engine/headrace_engine/runner/memory.py",
    "engine/headrace_engine/runner/models",
    "engine/headrace_engine/core/kv_cache_manager.py",
    "engine/headrace_engine/checkpoints",
)


def test_weights_larger_than_the_free_memory_are_refused_before_they_are_read(tmp_path: Path) -> None:
    transformers.LlamaConfig(**COMMON).save_pretrained(tmp_path)
    huge = {"model.embed_tokens.weight": {"dtype": "BF16", "shape": [1 << 21, 1 << 20], "data_offsets": [0, 1 << 42]}}
    header = json.dumps(huge).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    config = EngineArgs(model=str(tmp_path), dtype="float32").create_engine_config()
    with pytest.raises(ConfigError, match=r"take 8192\.0 GiB as float32, but only [\d.]+ GiB of memory are free"):
        create_runner(config).load_model()


def test_weights_are_counted_in_the_type_that_they_are_loaded_in(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 5, dtype=torch.bfloat16), "b": torch.zeros(2)}, tmp_path / "one.safetensors")
    save_file({"c": torch.zeros(7), "ids": torch.zeros(4, dtype=torch.int64)}, tmp_path / "two.safetensors")
    assert weight_bytes(tmp_path, torch.bfloat16) == (15 + 2 + 7) * 2 + 4 * 8
    assert weight_bytes(tmp_path, torch.float32) == (15 + 2 + 7) * 4 + 4 * 8


def test_kv_memory_beyond_what_is_free_is_refused(tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON))
    model.save_pretrained(tmp_path)
    config = EngineArgs(model=str(tmp_path), dtype="float32", num_blocks=1 << 34).create_engine_config()
    with pytest.raises(ConfigError, match=r"num_blocks asks for \d+ MiB of KV memory, but only \d+ MiB are free"):
        EngineCore(config, create_runner(config))
    assert available_memory() > 0


LOAD = """
import sys
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.core.runner_factory import create_runner

def memory(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

def load(model):
    runner = create_runner(EngineArgs(model=model, dtype="float32").create_engine_config())
    runner.load_model()
    return runner

runners = [load(sys.argv[1])]  # whatever is imported on the way
before = memory("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # forget the peak
runners.append(load(sys.argv[2]))
print(memory("VmHWM") - before, memory("VmRSS") - before)
"""


def loaded(small: Path, large: Path) -> tuple[int, int]:
    """Return how many bytes more a process had at most, and has, once it has loaded the large model, too."""
    command = [sys.executable, "-c", LOAD, str(small), str(large)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    peak, resident = map(int, done.stdout.split())
    return peak, resident


needs_peaks = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from /proc")


@needs_peaks
def test_loading_holds_the_weights_once(tmp_path: Path) -> None:
    sizes = {"small": {}, "large": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 5}}
    for name, size in sizes.items():
        config = transformers.LlamaConfig(**{**COMMON, **size})
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config)
        model.to_empty(device="cpu")
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data.fill_(0.01)
        model.save_pretrained(tmp_path / name)
    peak, resident = loaded(tmp_path / "small", tmp_path / "large")
    weights = (tmp_path / "large" / "model.safetensors").stat().st_size
    assert weights > 128 << 20
    assert 0.9 * weights < resident < 1.2 * weights
    assert peak < 1.6 * weights


@needs_peaks
def test_loading_a_gguf_file_of_floats_keeps_no_pages_of_it(tmp_path: Path) -> None:
    small = write_model(tmp_path / "small.gguf", "llama", lambda _: "BF16")
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "num_attention_heads": 32}
    large = write_model(tmp_path / "large.gguf", "llama", lambda _: "BF16", **sizes)
    peak, resident = loaded(small, large)
    weights = 2 * large.stat().st_size
    assert weights > 128 << 20
    assert resident < 1.1 * weights
    assert peak < 1.55 * weights
