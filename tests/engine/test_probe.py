"""The look at a model before it is served: what it takes from the runs, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AttentionInterface

from engine.model_families import COMMON, FAMILIES, WINDOW
from engine.tiny_models import save_model
from headrace_engine import LLM, SamplingParams
from headrace_engine.core.runner_factory import create_runner
from headrace_engine.errors import ConfigError, ModelLoadError
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.runner.attention.backend import LayerSpec
from headrace_engine.runner.linear.replacement import watch_weights
from headrace_engine.runner.models.probe import inspect_model

pytestmark = pytest.mark.rotated(
    "engine/headrace_engine/runner/models",
    "engine/headrace_engine/runner/attention",
    "engine/headrace_engine/runner/linear",
    "tests/engine/model_families.py",
)


def model_of(name: str, **options: Any) -> Any:
    """A family's model that calls an attention function named by nobody else."""
    AttentionInterface.register("probe_test", lambda *_, **__: pytest.fail("the stand-in was not called"))
    config = FAMILIES[name].config()
    for key, value in options.items():
        setattr(config, key, value)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="probe_test").eval()


def test_layers_that_differ_are_each_seen_as_they_are() -> None:
    layers = inspect_model(model_of("gemma4_text"), 200).layers
    assert [(layer.k_dim, layer.window) for layer in layers] == [(16, WINDOW), (32, None)] * 3
    assert [layer.kv_source for layer in layers] == [None, None, None, None, 2, 3]


def test_keys_and_values_may_have_different_sizes() -> None:
    (first, *_) = inspect_model(model_of("deepseek_v3"), 200).layers
    assert first == LayerSpec(num_heads=4, num_kv_heads=4, k_dim=32, v_dim=20)


def test_a_window_longer_than_any_request_is_none() -> None:
    assert inspect_model(model_of("mistral"), WINDOW).layers[0].window is None
    assert inspect_model(model_of("mistral"), WINDOW + 1).layers[0].window == WINDOW


def test_the_model_is_left_as_it_was() -> None:
    model = model_of("llama")
    inspect_model(model, 200)
    with pytest.raises(pytest.fail.Exception, match="stand-in was not called"):
        model(input_ids=torch.tensor([[1, 2]]), use_cache=False)
    assert not model.get_input_embeddings()._forward_hooks


@pytest.mark.parametrize("seed", [6, 7, 11, 12])  # with weights of the first three a row more changes little
def test_a_model_that_ignores_positions_is_refused(seed: int) -> None:
    torch.manual_seed(seed)
    model = model_of("llama")
    rotary = model.model.rotary_emb
    own_forward = rotary.forward
    rotary.forward = lambda x, position_ids: own_forward(x, torch.arange(x.shape[1])[None])
    with pytest.raises(ModelLoadError, match="place in the row for its position and ignores position_ids"):
        inspect_model(model, 200)


def test_a_model_that_mixes_neighbouring_tokens_is_refused() -> None:
    model = model_of("llama")
    model.model.layers[1].mlp.register_forward_hook(lambda _, __, output: output + output.roll(1, dims=1))
    with pytest.raises(ModelLoadError, match="from token to token outside of its attention"):
        inspect_model(model, 200)


def changed_attention(change: Callable[..., tuple[Any, ...]]) -> Any:
    model = model_of("llama")
    module = model.model.layers[1].self_attn
    own_forward = module.forward
    module.forward = lambda **kwargs: own_forward(**change(kwargs))
    return model


def test_an_option_of_unknown_meaning_is_refused() -> None:
    model = changed_attention(lambda kwargs: {**kwargs, "position_bias": torch.zeros(1)})  # type: ignore[arg-type,return-value]
    with pytest.raises(ModelLoadError, match="passes position_bias to its attention"):
        inspect_model(model, 200)


def test_a_mask_made_by_the_model_itself_is_refused() -> None:
    model = changed_attention(lambda kwargs: {**kwargs, "attention_mask": torch.ones(1, 1, 6, 6, dtype=torch.bool)})  # type: ignore[arg-type,return-value]
    with pytest.raises(ModelLoadError, match="computes attention masks of its own"):
        inspect_model(model, 200)


def test_a_weight_that_the_model_reads_itself_is_found() -> None:
    model = model_of("llama")
    head, gate = model.lm_head, model.model.layers[0].mlp.gate_proj
    head.register_forward_hook(lambda module, _, output: output + gate.weight.sum())
    with watch_weights(model) as found:
        inspect_model(model, 200)
    assert found == {gate}
    assert type(gate) is torch.nn.Linear


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


LONG = rope(
    "longrope",
    short_factor=[1.0] * 8,
    long_factor=[1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
    original_max_position_embeddings=40,
    factor=4.0,
)


def save_phi3(folder: Path, options: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    config = transformers.Phi3Config(**{**COMMON, "original_max_position_embeddings": 40, **options})
    model = transformers.Phi3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.4)
        model.model.embed_tokens.weight[0] = 0  # as transformers loads it
    model.save_pretrained(folder)
    model.generation_config.eos_token_id = None
    return model


def tokens_of(folder: Path, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    from engine.tiny_models import save_tokenizer

    save_tokenizer(folder)
    llm = LLM(str(folder), dtype="float32", num_blocks=60, block_size=16, **options)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def generate(reference: Any, prompt: list[int]) -> list[int]:
    output = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def test_longrope_without_a_stated_length_uses_the_short_factors_up_to_their_limit(tmp_path: Path) -> None:
    reference = save_phi3(tmp_path, LONG)
    prompts = [[5, 6, 7], [9] * 20, [11, 300] * 15]
    assert tokens_of(tmp_path, prompts) == [generate(reference, prompt) for prompt in prompts]
    with pytest.raises(ValueError, match="40"):
        tokens_of(tmp_path, [[5] * 41])


def test_longrope_beyond_that_limit_uses_the_long_factors_for_every_request_of_a_batch(tmp_path: Path) -> None:
    reference = save_phi3(tmp_path, LONG)
    long_prompts = [[9, 70] * 25, [11, 300, 4] * 30]
    alone = tokens_of(tmp_path, [[5, 6, 7]], max_model_len=128)
    together = tokens_of(tmp_path, [[5, 6, 7], *long_prompts], max_model_len=128)
    assert together[1:] == [generate(reference, prompt) for prompt in long_prompts]
    assert together[:1] == alone


def test_dynamic_scaling_is_served_up_to_where_it_begins(tmp_path: Path) -> None:
    reference = save_model("llama", tmp_path)
    config = transformers.LlamaConfig(**{**COMMON, **rope("dynamic", factor=4.0)})
    config.save_pretrained(tmp_path)
    reference.generation_config.eos_token_id = None
    prompts = [[5, 6, 7], [9, 8] * 60]
    assert tokens_of(tmp_path, prompts) == [generate(reference, prompt) for prompt in prompts]
    runner = create_runner(EngineArgs(model=str(tmp_path), max_model_len=257).create_engine_config())
    with pytest.raises(ConfigError, match="max_model_len must be at most 256, the model's positions, got 257"):
        runner.load_model()
