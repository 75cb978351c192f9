"""The GPU's runner with quantised checkpoints, in Triton's interpreter: transformers' tokens."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cuda.cuda_on_cpu import make_core
from engine.packed_models import workload
from engine.quantised_files import KINDS, write_checkpoint
from engine.tiny_models import TinyModel, generate_greedily
from headrace_engine.core.engine_core import EngineCore
from headrace_engine.errors import ConfigError
from headrace_engine.runner.fused.fusion import decoder_layers
from headrace_engine.runner.linear import triton_quantised_linear
from headrace_engine.runner.linear.quantised_weight import CodeKind
from headrace_engine.runner.linear.triton_quantised_linear import TritonQuantisedLinear
from headrace_engine.runner.models import weight_memory

pytestmark = [
    pytest.mark.rotated(
        "engine/headrace_engine/runner/cuda",
        "engine/headrace_engine/runner/linear",
        "engine/headrace_engine/runner/models",
        "engine/headrace_engine/runner/weights",
    ),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed: make test-triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and so no interpreter"),
    # numpy warns of the huge values with which a model is inspected
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]

REQUESTS = [(workload()[1][0], 3), (workload()[0][0], 2)]  # few steps: the interpreter takes seconds for one
AWQ, FP8 = "awq, groups of 128", "fp8, blocks with an edge and scales in bfloat16"


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one after another, each for milliseconds. Blocks of a GPU's size are tested elsewhere."""
    monkeypatch.setattr(triton_quantised_linear, "_BLOCK_OUTPUTS", 256)
    monkeypatch.setattr(triton_quantised_linear, "_BLOCK_BYTES", 128)


def core_of(folder: Path) -> EngineCore:
    model = TinyModel("tiny", str(folder), None)
    options: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 2, "max_model_len": 64}
    return make_core(model, attention_backend="triton", **options)


def layers_of(core: EngineCore) -> Any:
    runner: Any = core.runner
    return decoder_layers(runner._model._model)


@pytest.mark.parametrize("kind", [AWQ, FP8, "packed, 4 bits, act-order", "int8 with zeros"])
def test_tokens_are_those_of_transformers_on_dequantised_weights(kind: str, tmp_path: Path) -> None:
    reference = TinyModel("tiny", str(tmp_path), write_checkpoint(tmp_path, KINDS[kind]))
    core = core_of(tmp_path)
    for layer in layers_of(core):
        assert {type(layer.qkv), type(layer.o), type(layer.gated._gate_up)} == {TritonQuantisedLinear}
    assert generate_greedily(core, REQUESTS) == [reference.generate(*request) for request in REQUESTS]


def test_layers_whose_inputs_are_in_different_orders_are_merged_dequantised(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, KINDS["packed, 4 bits, act-order"], one_order=False)
    core = core_of(tmp_path)
    assert not isinstance(layers_of(core)[0].qkv, TritonQuantisedLinear)
    reference = TinyModel("tiny", str(tmp_path), model)
    assert generate_greedily(core, REQUESTS) == [reference.generate(*request) for request in REQUESTS]


def test_what_the_gpu_cannot_compute_is_widened_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton_quantised_linear, "supports", lambda kind, _: kind is not CodeKind.FLOAT8)
    model = write_checkpoint(tmp_path, KINDS[FP8])
    with caplog.at_level(logging.WARNING):
        core = core_of(tmp_path)
    assert "linear layers are dequantised, to" in caplog.text
    reference = TinyModel("tiny", str(tmp_path), model)
    assert generate_greedily(core, REQUESTS) == [reference.generate(*request) for request in REQUESTS]


def test_weights_in_8_bit_floats_are_counted_with_the_memory_that_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_checkpoint(tmp_path, KINDS[FP8])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    monkeypatch.setattr(weight_memory, "available_memory", lambda: 2 * parameters)  # float32 would need twice that
    core = core_of(tmp_path)
    assert core.model_info.num_parameters == parameters
    monkeypatch.setattr(weight_memory, "available_memory", lambda: parameters // 2)
    with pytest.raises(ConfigError, match=r"but only [\d.]+ GiB of memory are free"):
        core_of(tmp_path)
