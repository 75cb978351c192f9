"""The GPU's runner with fused layers, on the CPU: transformers' tokens, and layers replaced where they may be."""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from engine.cuda.cuda_on_cpu import make_core
from engine.cuda.test_cuda_runner import PROMPTS, WORKLOAD
from engine.model_families import FAMILIES, MAX_POSITIONS, VOCAB_SIZE, Family
from engine.tiny_models import TinyModel, generate_greedily, save_model, save_tokenizer
from headrace_engine.core.engine_core import EngineCore
from headrace_engine.runner.elementwise import native_ops, ops
from headrace_engine.runner.fused import fusion
from headrace_engine.runner.fused.decoder_layer import FusedDecoderLayer
from headrace_engine.runner.fused.fusion import decoder_layers
from headrace_engine.runner.linear.prepared_linear import DeviceLinear, LinearKind, TritonLinear
from headrace_engine.runner.models import paged_model

pytestmark = pytest.mark.rotated_file("engine/headrace_engine/runner/cuda")


def fused_layers(core: EngineCore) -> list[FusedDecoderLayer]:
    """The fused ones, all by products of one kind."""
    runner: Any = core.runner
    found = [each for each in decoder_layers(runner._model._model) or () if isinstance(each, FusedDecoderLayer)]
    assert runner._model.num_fused == len(found)
    return found


def kinds(layers: list[FusedDecoderLayer]) -> set[LinearKind]:
    return {type(product) for layer in layers for product in (layer.qkv, layer.o)}


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("llama", 3),
        ("qwen2", 3),
        ("qwen3", 3),
        ("qwen3_moe", 3),
        ("gemma2", 4),
        ("gemma3_text", 4),
        ("phi3", 3),
        ("olmo2", 3),
        ("granite", 3),
        ("gpt2", 0),
    ],
)
def test_layers_of_known_parts_are_fused_and_every_family_generates_what_transformers_generates(
    tiny_model: Callable[[str], TinyModel], name: str, fused: int
) -> None:
    model = tiny_model(name)
    core = make_core(model)
    layers = fused_layers(core)
    assert len(layers) == fused
    assert kinds(layers) <= {DeviceLinear}
    expected = [model.generate(prompt, max_tokens) for prompt, max_tokens in WORKLOAD]
    assert generate_greedily(core, WORKLOAD) == expected


def test_biases_of_every_projection_are_computed(tmp_path: Path) -> None:
    family = Family("llama", options={"attention_bias": True, "mlp_bias": True})
    reference = save_model(family, tmp_path)
    save_tokenizer(tmp_path)
    model = TinyModel("llama with biases", str(tmp_path), reference)
    core = make_core(model)
    assert len(fused_layers(core)) == 3
    expected = [model.generate(prompt, max_tokens) for prompt, max_tokens in WORKLOAD]
    assert generate_greedily(core, WORKLOAD) == expected


def test_bfloat16_layers_are_fused(llama: TinyModel) -> None:
    core = make_core(llama, dtype="bfloat16")
    assert len(fused_layers(core)) == 3
    assert [len(tokens) for tokens in generate_greedily(core, WORKLOAD[:2])] == [9, 14]


def test_nothing_is_computed_by_the_kernels_of_the_host(
    tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def library() -> Any:
        raise AssertionError("a kernel of the host would read an address of the device")

    model = tiny_model("qwen3_moe")  # head norms, and an MLP of the layer's own
    monkeypatch.setattr(native_ops, "library", library)
    core = make_core(model)
    assert len(fused_layers(core)) == 3
    assert generate_greedily(core, WORKLOAD[1:3]) == [model.generate(*request) for request in WORKLOAD[1:3]]


def test_layers_are_tried_and_computed_where_their_weights_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a GPU, "meta" is another device than the CPU: it knows shapes alone, and refuses what lies elsewhere.
    monkeypatch.setattr(fusion, "differs", lambda *_: False)
    monkeypatch.setattr(ops, "_equal_up_to_rounding", lambda *_: True)
    monkeypatch.setattr(fusion, "_is_chain", lambda _: True)
    AttentionInterface.register("device_test", fusion._plain_attention)
    config = FAMILIES["qwen3"].config()
    config._attn_implementation = "device_test"
    meta = torch.device("meta")
    with meta:
        model = AutoModelForCausalLM.from_config(config).eval()
    assert fusion.fuse_decoder_layers(model, MAX_POSITIONS, linear=DeviceLinear) == 3
    token_ids = torch.zeros(1, 5, dtype=torch.long, device=meta)
    with torch.inference_mode():
        logits = model(input_ids=token_ids, position_ids=token_ids, use_cache=False).logits
    assert logits.shape == (1, 5, VOCAB_SIZE)
    assert logits.device == meta


def test_no_two_layers_hold_their_original_weights_beside_merged_ones(
    llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    originals: list[weakref.ref[Any]] = []
    left: list[int] = []

    class Counting(DeviceLinear):
        def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
            super().__init__(weight, bias)
            left.append(sum(own() is not None for own in originals))

    def remember(model: Any, *args: Any) -> None:
        own(model, *args)
        originals.extend(weakref.ref(layer.self_attn.q_proj.weight) for layer in model.model.layers)

    own = paged_model.check_model_fits
    monkeypatch.setattr(paged_model, "check_model_fits", remember)
    monkeypatch.setattr(paged_model, "DeviceLinear", Counting)
    assert len(fused_layers(make_core(llama))) == 3
    assert left == [3] * 4 + [2] * 4 + [1] * 4  # q|k|v, o, gate|up and down of each


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and so no interpreter")
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_kernels_of_attention_and_of_the_passes_serve_a_model_in_the_interpreter(
    tiny_model: Callable[[str], TinyModel], name: str
) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: make test-triton")
    model = tiny_model(name)
    workload = [(PROMPTS[4][:20], 3), (PROMPTS[1], 2)]
    expected = [model.generate(prompt, max_tokens) for prompt, max_tokens in workload]
    core = make_core(model, attention_backend="triton", max_num_batched_tokens=16, max_num_seqs=2, max_model_len=64)
    layers = fused_layers(core)
    assert len(layers) == 3
    assert kinds(layers) == {TritonLinear}
    assert generate_greedily(core, workload) == expected
