"""What a checkpoint's files say about the end of outputs and about sampling, and what is made of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.tiny_models import VOCAB_SIZE, save_model, save_tokenizer
from headrace_engine import LLM, EngineArgs, SamplingParams
from headrace_engine.errors import ConfigError, ModelLoadError
from headrace_engine.runner.models.generation import read_generation_config

EOS, OTHER = 2, 77
Checkpoint = Callable[..., str]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A tiny model whose files say what the arguments say."""
    source = tmp_path_factory.mktemp("source")
    save_model("llama", source)
    save_tokenizer(source)

    def make(*, config: Any = (), generation: Any = (), tokenizer: Any = ()) -> str:
        folder: Path = tmp_path_factory.mktemp("checkpoint")
        for path in source.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        changes = {"config.json": config, "generation_config.json": generation, "tokenizer_config.json": tokenizer}
        for name, change in changes.items():
            values = json.loads((folder / name).read_text()) | dict(change)
            (folder / name).write_text(json.dumps(values))
        return str(folder)

    return make


def load(folder: str, **options: Any) -> LLM:
    return LLM(folder, dtype="float32", num_blocks=20, block_size=16, **options)


def ends_with(llm: LLM, token_id: int) -> bool:
    """Whether this token ends an output, once min_tokens allows it."""
    params = SamplingParams(max_tokens=6, min_tokens=2, logit_bias={token_id: 100.0})
    (output,) = llm.generate("mill", params, use_tqdm=False)
    choice = output.outputs[0]
    assert token_id not in choice.token_ids[:2] or choice.finish_reason == "length"
    return choice.finish_reason == "stop" and choice.token_ids[2:] == [token_id]


@pytest.mark.parametrize("named", [[EOS, 9999], [-1, EOS], -1, VOCAB_SIZE, [9999, -5]])
def test_end_tokens_outside_the_vocabulary_are_ignored_with_a_warning(
    checkpoint: Checkpoint, named: Any, caplog: pytest.LogCaptureFixture
) -> None:
    change = {"eos_token_id": named}
    with caplog.at_level(logging.WARNING, "headrace_engine"):
        llm = load(checkpoint(config=change, generation=change))
    assert any("ignored: the vocabulary ends at 383" in record.message for record in caplog.records)
    try:
        assert llm.engine.model_info.eos_token_ids == [EOS]  # the tokenizer names it, too
        assert ends_with(llm, EOS)
        form = SamplingParams(max_tokens=6, structured_outputs={"regex": "[0-9]{3}"})  # type: ignore[arg-type]
        (output,) = llm.generate("mill", form, use_tqdm=False)
        assert (len(output.outputs[0].text), output.outputs[0].finish_reason) == (3, "stop")
    finally:
        llm.close()


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "end_tokens"),
    [
        ({"eos_token_id": None}, {"eos_token_id": None}, {}, [EOS]),
        ({"eos_token_id": None}, {"eos_token_id": OTHER}, {"eos_token": None}, [OTHER]),
        ({"eos_token_id": OTHER}, {"eos_token_id": None}, {"eos_token": None}, [OTHER]),
        ({"eos_token_id": 5}, {"eos_token_id": [OTHER, 78]}, {}, [OTHER, 78, EOS]),
        ({"eos_token_id": None}, {"eos_token_id": None}, {"eos_token": None}, []),
    ],
)
def test_each_token_that_tokenizer_or_generation_config_name_ends_an_output(
    checkpoint: Checkpoint, config: Any, generation: Any, tokenizer: Any, end_tokens: list[int]
) -> None:
    llm = load(checkpoint(config=config, generation=generation, tokenizer=tokenizer))
    try:
        assert llm.engine.model_info.eos_token_ids == end_tokens
        for token_id in (EOS, 5, OTHER, 78):
            assert ends_with(llm, token_id) == (token_id in end_tokens)
    finally:
        llm.close()


def test_a_grammar_ends_with_a_token_that_only_the_tokenizer_names(checkpoint: Checkpoint) -> None:
    nothing = {"eos_token_id": None}
    llm = load(checkpoint(config=nothing, generation=nothing))
    try:
        form = SamplingParams(max_tokens=6, structured_outputs={"choice": ["wheel"]})  # type: ignore[arg-type]
        (output,) = llm.generate("mill", form, use_tqdm=False)
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("wheel", "stop")
        assert output.outputs[0].token_ids[-1] == EOS
    finally:
        llm.close()


@pytest.mark.parametrize("pad", [9999, -1])
def test_a_padding_token_outside_the_vocabulary_does_no_harm(checkpoint: Checkpoint, pad: int) -> None:
    llm = load(checkpoint(config={"pad_token_id": pad, "bos_token_id": 9999}))
    llm.generate("mill", SamplingParams(max_tokens=1), use_tqdm=False)
    llm.close()


def test_end_tokens_of_a_wrong_type_are_named(checkpoint: Checkpoint) -> None:
    with pytest.raises(ModelLoadError, match="eos_token_id"):
        load(checkpoint(config={"eos_token_id": "2"}))


OWN = {"temperature": 0.6, "top_p": 0.9, "top_k": 7, "repetition_penalty": 1.1, "min_p": 0.1, "max_new_tokens": 3}
READ = {"temperature": 0.6, "top_p": 0.9, "top_k": 7, "repetition_penalty": 1.1, "min_p": 0.1, "max_tokens": 3}


def test_a_call_without_parameters_uses_the_checkpoints_defaults(checkpoint: Checkpoint) -> None:
    llm = load(checkpoint(generation=OWN))
    try:
        assert llm.get_default_sampling_params() == SamplingParams(**READ)
        (output,) = llm.generate("mill", use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3
        (output,) = llm.generate("mill", SamplingParams(ignore_eos=True), use_tqdm=False)  # as it stands
        assert len(output.outputs[0].token_ids) == 16
        llm.engine.add_request("a", "mill")
        assert [output for _ in range(3) for output in llm.engine.step()][-1].finished
    finally:
        llm.close()


@pytest.mark.parametrize(
    ("options", "defaults"),
    [
        ({"generation_config": "vllm"}, {}),
        ({"generation_config": "vllm", "override_generation_config": {"top_k": 3}}, {"top_k": 3}),
        ({"override_generation_config": {"top_k": 3, "max_new_tokens": 9}}, READ | {"top_k": 3, "max_tokens": 9}),
    ],
)
def test_options_say_where_defaults_come_from(checkpoint: Checkpoint, options: Any, defaults: Any) -> None:
    llm = load(checkpoint(generation=OWN), **options)
    assert llm.engine.model_info.default_sampling_params == defaults
    llm.close()


def test_another_folder_gives_defaults_and_end_tokens(checkpoint: Checkpoint) -> None:
    folder = checkpoint(generation={"temperature": 0.5, "eos_token_id": OTHER})
    llm = load(checkpoint(generation=OWN, tokenizer={"eos_token": None}), generation_config=folder)
    assert llm.engine.model_info.default_sampling_params == {"temperature": 0.5}
    assert llm.engine.model_info.eos_token_ids == [OTHER]
    llm.close()
    with pytest.raises(ModelLoadError, match=r"generation_config is '.*, and there is no such folder; give auto"):
        load(folder, generation_config=f"{folder}/nowhere")


def test_defaults_that_no_request_could_have_are_ignored_with_a_warning(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint(generation={"temperature": -1.0, "top_p": 0.9})
    with caplog.at_level(logging.WARNING, "headrace_engine"):
        llm = load(folder)
    assert llm.engine.model_info.default_sampling_params == {"top_p": 0.9}
    assert any("temperature ignored" in record.message for record in caplog.records)
    llm.close()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"generation_config": ""}, "generation_config must be auto, vllm or a folder, got ''"),
        ({"override_generation_config": [1]}, "override_generation_config must be a map"),
        (
            {"override_generation_config": {"beam": 1}},
            "names of override_generation_config must be of repetition",
        ),
        (
            {"override_generation_config": {"top_p": 7}},
            "override_generation_config: top_p must be above 0 and at most 1",
        ),
    ],
)
def test_wrong_options_are_refused(options: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        EngineArgs(model="m", **options).create_engine_config()


@pytest.mark.parametrize("content", ["[1]", "{", "7", "null"])
def test_a_broken_file_of_another_folder_is_refused_by_a_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    config = EngineArgs(model="m", generation_config=str(tmp_path)).create_engine_config()
    with pytest.raises(ModelLoadError, match=f"^generation_config '{tmp_path}' cannot be read: "):
        read_generation_config(config.model, None)


def test_options_are_made_plain_data() -> None:
    args = EngineArgs(
        model="m",
        generation_config=Path("folder"),  # type: ignore[arg-type]
        override_generation_config={"temperature": np.float32(0.5), "top_k": np.int64(3), "top_p": np.array(1.0)},
    )
    model = args.create_engine_config().model
    assert model.generation_config == "folder"
    assert model.override_generation_config == {"temperature": 0.5, "top_k": 3, "top_p": 1.0}
    assert {type(value) for value in model.override_generation_config.values()} == {float, int}
    args = EngineArgs(model="m", generation_config=None, override_generation_config=None)  # type: ignore[arg-type]
    model = args.create_engine_config().model
    assert (model.generation_config, model.override_generation_config) == ("auto", {})


@pytest.mark.parametrize("device", ["cpu", "static-cpu"])
def test_a_broken_file_of_the_model_is_refused_by_a_sentence(checkpoint: Checkpoint, device: str) -> None:
    folder = checkpoint()
    (Path(folder) / "generation_config.json").write_text("[1]")
    with pytest.raises(ModelLoadError, match=f"^model '{folder}' cannot be (read|loaded): "):
        load(folder, device=device)
