"""What a folder says, and what is refused with the reason before any weight is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.pooling.tiny_pooling_models import NORMALIZE, SIZE, add_modules, build, dense, pooling, write
from headrace_engine.api.llm import LLM
from headrace_engine.checkpoints.pooling_folder import read_pooling_spec
from headrace_engine.errors import ConfigError, ModelLoadError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build(tmp_path, "bert")
    add_modules(tmp_path, [pooling(), dense(SIZE, 16), NORMALIZE])
    return tmp_path


def edit(path: Path, **values: Any) -> None:
    write(path, {**json.loads(path.read_text()), **values})


def rename_module(folder: Path, index: int, name: str) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    modules[index]["type"] = f"sentence_transformers.models.{name}"
    write(folder / "modules.json", modules)


def pickle_dense(folder: Path) -> None:
    (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")


def pickle_model(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def drop_layer(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["encoder.layer.1.output.dense.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


REFUSALS: list[tuple[Callable[[Path], object], str]] = [
    (pickle_dense, "pickled weights in 2_Dense/pytorch_model.bin, which are never loaded: convert them to"),
    (pickle_model, "has its weights in pytorch_model.bin, which is never loaded: convert it to model.safetensors"),
    (drop_layer, "lacks 1 weights, the first is 'encoder.layer.1.output.dense.weight'"),
    (lambda f: rename_module(f, 0, "StaticEmbedding"), "begins with the module StaticEmbedding"),
    (lambda f: rename_module(f, 0, "CLIPModel"), "begins with the module CLIPModel"),
    (lambda f: rename_module(f, 2, "WordWeights"), "has the module WordWeights, which is not served"),
    (lambda f: rename_module(f, 1, "SpladePooling"), "has the module SpladePooling, which gives sparse vectors"),
    (lambda f: rename_module(f, 1, "LSTM"), "has the module LSTM, which is not served"),
    (
        lambda f: edit(f / "config_sentence_transformers.json", model_type="SparseEncoder"),
        "is a SparseEncoder, which computes sparse vectors; served are models with one vector a text",
    ),
    (
        lambda f: edit(f / "config_sentence_transformers.json", model_type="MultiVectorEncoder"),
        "is a MultiVectorEncoder, which computes a vector for each token",
    ),
    (lambda f: edit(f / "1_Pooling" / "config.json", pooling_mode="median"), "has the pooling mode 'median'; served"),
    (lambda f: edit(f / "2_Dense" / "config.json", activation_function="evil.Code"), "has the activation 'evil.Code'"),
    (lambda f: edit(f / "2_Dense" / "config.json", in_features=99), "takes 99 numbers, the module before it gives 32"),
    (lambda f: edit(f / "2_Dense" / "config.json", out_features=17), "does not fit its config.json"),
    (lambda f: edit(f / "config.json", quantization_config={"quant_method": "awq"}), "is quantised with awq"),
    (lambda f: edit(f / "config.json", model_type="t5gemma", is_encoder_decoder=True), "cannot be|is an encoder"),
]


@pytest.mark.parametrize(("change", "reason"), REFUSALS, ids=[reason[:40] for _, reason in REFUSALS])
def test_what_is_not_served_is_refused_by_name(folder: Path, change: Callable[[Path], object], reason: str) -> None:
    change(folder)
    with pytest.raises(ModelLoadError, match=reason):
        LLM(str(folder), dtype="float32")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "float16"}, "dtype"),
        ({"quantization": "int8"}, "quantization is 'int8', but models that embed or score are not quantised"),
        ({"enable_lora": True}, "enable_lora is set, but models that embed or score take no adapters"),
        ({"max_model_len": 81}, "max_model_len must be at most 80, the model's positions, got 81"),
    ],
)
def test_an_option_that_does_not_fit_is_refused(folder: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        LLM(str(folder), **options)


def test_a_head_that_does_not_give_transformers_scores_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path, "bert", suffix="ForSequenceClassification", config={"num_labels": 1})
    monkeypatch.setattr("headrace_engine.runner.pooling.heads._BaseStandIn._pooled", lambda self: self.rows[:, 0])
    with pytest.raises(ModelLoadError, match=r"cannot be served: its results differ by .* from transformers'"):
        LLM(str(tmp_path), dtype="float32")


def test_a_model_that_packing_would_change_is_computed_in_groups(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = LLM(str(folder), dtype="float32").embed(["water", "the mill"], use_tqdm=False)
    monkeypatch.setattr(
        "headrace_engine.runner.attention.varlen.NativeVarlen.forward",
        lambda self, query, key, value, **_: torch.zeros_like(query),
    )
    found = LLM(str(folder), dtype="float32").embed(["water", "the mill"], use_tqdm=False)
    assert "BertModel is computed in groups of equal length: its results differ by" in caplog.text
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(one.outputs.embedding), torch.tensor(other.outputs.embedding))


def test_a_model_that_generates_is_none_of_these(tmp_path: Path) -> None:
    for name in ("LlamaForCausalLM", "GPT2LMHeadModel", "Gemma3ForConditionalGeneration"):
        write(tmp_path / "config.json", {"architectures": [name]})
        assert read_pooling_spec(str(tmp_path)) is None
    assert read_pooling_spec("organisation/name") is None


def test_an_activation_is_found_where_each_release_wrote_it(tmp_path: Path) -> None:
    for config in (
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
    ):
        write(tmp_path / "config.json", {"architectures": ["BertForSequenceClassification"], **config})
        spec = read_pooling_spec(str(tmp_path))
        assert spec is not None
        assert spec.activation == "Sigmoid"
