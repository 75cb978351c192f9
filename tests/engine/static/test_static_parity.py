"""The static step's greedy float32 tokens are those of transformers' own `generate`, whatever padding surrounds it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model_families import FAMILIES, VOCAB_SIZE, WINDOW, Family
from engine.test_parity import MAX_MODEL_LEN, Run, references, workload
from engine.tiny_models import TinyModel, save_model, save_tokenizer
from headrace_engine import LLM, SamplingParams
from headrace_engine.core.engine_core import EngineCore
from headrace_engine.errors import ConfigError, ModelLoadError
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.requests.request import EngineCoreRequest
from headrace_engine.runner.loader import create_runner
from headrace_engine.runner.static import weights

pytestmark = pytest.mark.rotated_file("engine/headrace_engine/runner/static")

MakeModel = Callable[[str], TinyModel]


def run(model: TinyModel, **options: Any) -> Run:
    return Run(model, device="static-cpu", **options)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_preemption_chunks_and_cache_hits_together_give_the_same_tokens(tiny_model: MakeModel, name: str) -> None:
    found = run(tiny_model(name), num_blocks=13, max_num_batched_tokens=19, max_num_seqs=7)
    assert found.preemptions >= 1
    assert found.hit_tokens >= 48
    assert found.in_order() == references(tiny_model(name))


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_buckets_and_arrival_order_do_not_matter(tiny_model: MakeModel, name: str) -> None:
    order = list(range(len(workload())))
    random.Random(3).shuffle(order)
    found = run(
        tiny_model(name),
        order=order,
        steps_between=2,
        max_num_seqs=6,
        block_size=32,
        prefill_buckets=[5, 40],
        decode_buckets=[3, 6],
        context_buckets=[40, MAX_MODEL_LEN],
        enable_prefix_caching=False,
    )
    assert found.in_order() == references(tiny_model(name))
    assert max(len(prompt) for prompt, _ in workload()) > 3 * WINDOW


def test_requests_that_fill_the_context_are_computed_to_its_end_beside_aborted_and_preempted_ones(
    llama: TinyModel,
) -> None:
    buckets = {"prefill_buckets": [7, 16], "decode_buckets": [3], "context_buckets": [48, MAX_MODEL_LEN]}
    args: dict[str, Any] = {"dtype": "float32", "block_size": 16, "num_blocks": 10, "max_num_seqs": 3, **buckets}
    config = EngineArgs(
        model=llama.folder, device="static-cpu", max_model_len=MAX_MODEL_LEN, **args
    ).create_engine_config()
    core = EngineCore(config, create_runner(config))
    draw = random.Random(5)
    lengths = {"full": MAX_MODEL_LEN - 1, "nearly": 97, "aborted": 100, "half": 60, "gone": 90, "short": 3}
    prompts = {name: [draw.randrange(3, VOCAB_SIZE) for _ in range(count)] for name, count in lengths.items()}
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
        core.add_request(EngineCoreRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params, seed=0))
    preemptions = 0
    was_aborted = False
    while core.has_work():
        result = core.step()
        core.check_integrity()
        preemptions += result.stats.preemptions
        for news in result.outputs:
            tokens[news.request_id] += news.new_token_ids
        if not was_aborted and 0 < core.scheduler.requests["aborted"].num_computed_tokens < lengths["aborted"]:
            core.abort_requests(["aborted", "gone"])
            was_aborted = True
    assert was_aborted
    assert tokens["aborted"] == []
    assert preemptions >= 1
    for name in ("full", "nearly", "half", "short"):
        assert tokens[name] == llama.generate(prompts[name], MAX_MODEL_LEN - lengths[name]), name


@pytest.mark.parametrize(
    "family",
    [
        FAMILIES["llama3"],
        FAMILIES["llama-yarn"],
        FAMILIES["qwen2-sliding"],
        Family("llama", options={"tie_word_embeddings": True}),
        Family("llama", options={"attention_bias": True, "mlp_bias": True}),
    ],
    ids=lambda family: family.special or "-".join(family.options),
)
def test_variants_of_the_family_are_computed(tmp_path: Path, family: Family) -> None:
    save_tokenizer(tmp_path)
    model = save_model(family, tmp_path)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    assert (tmp_path / "model.safetensors.index.json").exists()
    prompt = list(range(3, 90))
    model.generation_config.eos_token_id = None
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
    llm = LLM(str(tmp_path), device="static-cpu", dtype="float32", num_blocks=20)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    llm.close()
    assert output.outputs[0].token_ids == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "is a GemmaForCausalLM; devices with static shapes serve Llama"),
        ({"hidden_act": "gelu"}, "its activation must be silu, got 'gelu'"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "got 'dynamic'",
        ),
        ({"intermediate_size": 100}, "has shape [96, 64], its config asks for [100, 64]"),
        ({"num_hidden_layers": 4}, "lacks 9 weights, the first is 'model.layers.3"),
    ],
)
def test_what_the_step_cannot_compute_is_refused_by_name(
    llama: TinyModel, tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    config = json.loads((Path(llama.folder) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    (tmp_path / "model.safetensors").symlink_to(Path(llama.folder) / "model.safetensors")
    engine = EngineArgs(model=str(tmp_path), device="static-cpu", num_blocks=20).create_engine_config()
    with pytest.raises(ModelLoadError) as error:
        create_runner(engine).load_model()
    assert sentence in str(error.value)


def test_weights_without_safetensors_are_refused(llama: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(Path(llama.folder) / "config.json")
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    engine = EngineArgs(model=str(tmp_path), device="static-cpu", num_blocks=20).create_engine_config()
    with pytest.raises(ModelLoadError, match="only safetensors are loaded"):
        create_runner(engine).load_model()


def test_drafts_are_refused(llama: TinyModel) -> None:
    with pytest.raises(ConfigError, match="static-cpu cannot verify drafts"):
        LLM(
            llama.folder,
            device="static-cpu",
            num_blocks=20,
            speculative_config={"method": "ngram", "num_speculative_tokens": 2},
        )


def test_weights_and_generation_config_are_those_of_the_revision(
    llama: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--a--b"
    (repository / "refs").mkdir(parents=True)
    for revision, commit in (("main", "0" * 40), ("v2", "2" * 40)):
        (repository / "refs" / revision).write_text(commit)
        (repository / "snapshots" / commit).mkdir(parents=True)
    for path in Path(llama.folder).iterdir():
        (repository / "snapshots" / ("2" * 40) / path.name).symlink_to(path)
    options = {"device": "static-cpu", "dtype": "float32", "max_model_len": 32, "num_blocks": 20}
    config = EngineArgs(model="a/b", revision="v2", **options).create_engine_config()  # type: ignore[arg-type]
    files = weights._files("a/b", "v2")
    assert [str(Path(file).parent) for file in files] == [str(repository / "snapshots" / ("2" * 40))]
    assert weights.read_generation_config(config.model) is not None
    with pytest.raises(ModelLoadError, match="only safetensors are loaded"):
        weights._files("a/b", "main")
