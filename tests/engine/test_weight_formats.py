"""GGUF files are served with the blocks that they hold: tokens of transformers, and wrong files refused by tensor."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from engine.gguf_files import SIZES, Blocks, write_model
from engine.lora_adapters import make_adapter
from engine.packed_models import generate, load, workload
from engine.tiny_models import TinyModel
from headrace_engine import LLM, SamplingParams
from headrace_engine.errors import ConfigError, ModelLoadError
from headrace_engine.runner.fused.decoder_stack import DecoderStack
from headrace_engine.runner.linear import grouped_linear
from headrace_engine.runner.linear.grouped_linear import GroupedEmbedding, GroupedLinear
from headrace_engine.runner.linear.grouped_weight import FORMATS
from headrace_engine.runner.models import grouped_loading, weight_memory

pytestmark = [
    pytest.mark.rotated(
        "engine/headrace_engine/runner/linear",
        "engine/headrace_engine/runner/models",
        "engine/headrace_engine/runner/fused",
        "engine/headrace_engine/checkpoints",
        "tests/engine/gguf_files.py",
        "tests/engine/packed_models.py",
    ),
    pytest.mark.skipif(not grouped_linear.supported(torch.float32), reason="the kernels need AVX2 or AVX-512"),
]


def like_q4_k_m(name: str) -> str:
    """As llama.cpp mixes types: q, k and v of a layer differ, and two layers differ."""
    if "attn_v" in name or "blk.1.ffn_down" in name or name == "output.weight":
        return "Q6_K"
    return {"blk.0.attn_k.weight": "Q5_0", "token_embd.weight": "Q8_0"}.get(name, "Q4_K")


def with_floats(name: str) -> str:
    """Some parts of merged products have no kernel."""
    return "F16" if name in ("blk.0.attn_k.weight", "blk.1.ffn_up.weight", "token_embd.weight") else "Q4_0"


def reference(path: Path) -> TinyModel:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return TinyModel(path.stem, str(path), model)


MIXTURES: dict[str, Callable[[str], str]] = {"Q4_K_M": like_q4_k_m, "floats": with_floats}


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])  # llama.cpp permutes q and k of the first only
@pytest.mark.parametrize("kind", [*SIZES, *MIXTURES])
def test_tokens_are_those_of_transformers_on_dequantised_weights(architecture: str, kind: str, tmp_path: Path) -> None:
    tied = kind in ("Q8_0", "Q6_K")
    path = write_model(tmp_path / "tiny.gguf", architecture, MIXTURES.get(kind, lambda _: kind), tied=tied)
    model = reference(path)
    expected = [model.generate(prompt, max_tokens) for prompt, max_tokens in workload()]
    assert generate(path) == expected
    assert len({tuple(output) for output in expected}) > len(expected) / 2


def test_one_call_computes_all_layers_and_a_tied_head_shares_its_weight(tmp_path: Path) -> None:
    model = load(write_model(tmp_path / "tiny.gguf", "llama", like_q4_k_m, tied=True))
    assert [type(layer) for layer in model.model.layers] == [DecoderStack]
    layer = model.model.layers[0]._layers[0]
    assert [weight.format.name for weight in layer.qkv.weights] == ["Q4_K", "Q5_0", "Q6_K"]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, GroupedEmbedding)
    assert isinstance(head, GroupedLinear)
    assert head.weights[0] is embedding.grouped


def test_a_file_whose_weights_stay_packed_gets_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_model(tmp_path / "tiny.gguf", "llama", lambda _: "Q8_0")
    with caplog.at_level(logging.WARNING, "headrace_engine"):
        load(path)
    assert "dequantised" not in caplog.text


def test_a_type_without_a_kernel_is_dequantised_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_model(tmp_path / "tiny.gguf", "llama", lambda name: "MXFP4" if "ffn_down" in name else "Q8_0")
    model = reference(path)
    with caplog.at_level(logging.WARNING, "headrace_engine"):
        assert generate(path) == [model.generate(prompt, max_tokens) for prompt, max_tokens in workload()]
    assert "some tensors of type MXFP4 are dequantised, to 1 MiB: packed stay" in caplog.text


def test_a_type_that_cannot_be_dequantised_is_refused_with_its_tensor(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    kind = gguf.GGMLQuantizationType.Q8_K
    blocks = np.zeros((4, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    writer.add_tensor("blk.0.ffn_up.weight", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"tensor 'blk\.0\.ffn_up\.weight' is of type Q8_K, which the gguf"):
        load(path)


def test_a_machine_without_kernels_dequantises_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "tiny.gguf", "llama", lambda _: "Q8_0")
    monkeypatch.setattr(grouped_linear, "supported", lambda _: False)
    assert not grouped_linear.grouped_weights(load(path))
    assert "the GGUF file is dequantised: this machine has no compiled kernels for packed weights" in caplog.text


def test_experts_are_counted_with_the_memory_that_they_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "experts.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    blocks = np.zeros((4, 32, 144), np.uint8)  # 4 experts, 32 rows of 256 weights
    writer.add_tensor("blk.0.ffn_gate_exps.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(weight_memory, "available_memory", lambda: 2 * 4 * 32 * 256 - 1)
    with pytest.raises(ConfigError, match="of memory are free"):
        weight_memory.check_weights_fit(str(path), torch.bfloat16, FORMATS)
    monkeypatch.setattr(weight_memory, "available_memory", lambda: 2 * 4 * 32 * 256)
    weight_memory.check_weights_fit(str(path), torch.bfloat16, FORMATS)


@pytest.mark.parametrize("kind", FORMATS)
def test_packed_weights_are_counted_with_the_memory_that_they_take(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "tiny.gguf", "llama", lambda _: kind)
    model = load(path, enable_lora=True)  # layers are not merged
    needed = sum(parameter.nbytes for parameter in model.parameters())
    needed += sum(weight.strips.nbytes for weight in grouped_linear.grouped_weights(model))
    monkeypatch.setattr(weight_memory, "available_memory", lambda: needed - 1)
    with pytest.raises(ConfigError, match=r"take [\d.]+ GiB as packed blocks, but only [\d.]+ GiB of memory are free"):
        load(path)
    monkeypatch.setattr(weight_memory, "available_memory", lambda: needed)
    load(path)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K_M"])
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_bfloat16_is_close_to_float32(kind: str, batch_invariant: bool, tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", "llama", MIXTURES.get(kind, lambda _: kind))
    prompt, params = {"prompt_token_ids": workload()[3][0]}, SamplingParams(max_tokens=1, temperature=0, logprobs=5)
    found = []
    for dtype in ("float32", "bfloat16"):
        options: dict[str, Any] = {"batch_invariant": batch_invariant, "skip_tokenizer_init": True}
        llm = LLM(str(path), dtype=dtype, num_blocks=20, block_size=16, **options)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert output.outputs[0].logprobs is not None
        found.append({token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()})
    both = found[0].keys() & found[1].keys()
    assert len(both) >= 4
    assert (
        max(abs(found[0][token] - found[1][token]) for token in both) < 0.8
    )  # a wrong order of codes gives more than 3


def test_an_adapter_changes_packed_layers(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", "llama", like_q4_k_m)
    base = reference(path)
    adapter = make_adapter(base, tmp_path / "adapter", "a", 3, targets=["q_proj", "v_proj", "down_proj"])
    llm = LLM(str(path), dtype="float32", num_blocks=40, enable_lora=True, skip_tokenizer_init=True)
    prompt, params = workload()[2][0], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for request, expected in ((None, base), (adapter.request, adapter.merged)):
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, lora_request=request, use_tqdm=False)
        assert output.outputs[0].token_ids == expected.generate(prompt, 8)
    assert base.generate(prompt, 8) != adapter.merged.generate(prompt, 8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_speculation_changes_no_token(dtype: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", "llama", like_q4_k_m)
    prompts: list[Any] = [{"prompt_token_ids": [5, 9, 20, 31] * repeats} for repeats in (3, 7, 12)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    options: dict[str, Any] = {"dtype": dtype, "batch_invariant": True, "num_blocks": 40, "skip_tokenizer_init": True}
    speculative = {"method": "ngram", "num_speculative_tokens": 3}
    found = []
    for more in ({}, {"speculative_config": speculative}):
        llm = LLM(str(path), **options, **more)
        found.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
    assert found[0] == found[1]


def with_bad_scale(name: str, blocks: Blocks) -> Blocks:
    if name == "blk.1.ffn_up.weight":
        blocks = blocks.copy()
        blocks[7, 34:36] = 0x00, 0x7C
    return blocks


def test_a_scale_that_is_not_finite_is_refused_with_its_tensor_and_row(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", "llama", lambda _: "Q8_0", change=with_bad_scale)
    message = (
        r"tensor 'blk\.1\.ffn_up\.weight' of tiny\.gguf cannot be used: row 7 has a scale that is not finite, so its "
        "weights would be infinite or NaN; fetch or convert the file again"
    )
    with pytest.raises(ModelLoadError, match=message):
        load(path)


def test_a_size_that_does_not_fit_the_configuration_is_refused(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "tiny.gguf", "llama", lambda _: "Q8_0", change=lambda n, b: b[:-1] if n == "output.weight" else b
    )
    message = (
        r"tensor 'output\.weight' of tiny\.gguf has 159 rows of 256 values, but the configuration in the file needs"
    )
    with pytest.raises(ModelLoadError, match=message):
        load(path)


def test_a_file_that_ends_within_a_tensor_is_refused_with_its_name(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", "llama", lambda _: "Q8_0")
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size // 2])
    message = rf"tensor '[\w.]+' ends at byte \d+, but the file has {size // 2} bytes: it is truncated; fetch it again"
    with pytest.raises(ModelLoadError, match=message):
        load(path)


def test_an_unknown_type_is_refused_with_its_tensor(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", "llama", lambda _: "Q8_0")
    content = bytearray(path.read_bytes())
    name = b"blk.0.attn_k.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8  # dimensions: their number, and two sizes
    content[at : at + 4] = np.uint32(99).tobytes()
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"tensor 'blk\.0\.attn_k\.weight' is of type 99, which this version"):
        load(path)


@pytest.mark.parametrize("kind", ["BF16", "F16", "F32", "Q2_K"])
def test_other_tensors_have_the_bits_that_gguf_gives_them(kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    weights, size = gguf.GGML_QUANT_SIZES[number]
    data = np.random.default_rng(0).integers(0, 256, (7, 512 // weights * size), dtype=np.uint8)
    with np.errstate(all="ignore"):  # some bytes are infinite or NaN
        expected = gguf.dequantize(data.copy(), number)
        found = grouped_loading.dequantised(data, number)
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()
