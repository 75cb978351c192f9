"""A model's own forward pass is left out exactly where it does nothing but the common thing around its layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.tiny_models import TinyModel
from headrace_engine import LLM, SamplingParams
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.requests.outputs import CompletionOutput
from headrace_engine.runner.fused.short_forward import ShortForward
from headrace_engine.runner.linear import native_linear
from headrace_engine.runner.models import loading
from headrace_engine.runner.models.paged_model import PagedModel

pytestmark = pytest.mark.rotated(
    "engine/headrace_engine/runner/fused",
    "engine/headrace_engine/runner/models",
    "engine/headrace_engine/runner/linear",
)

Change = Callable[[Any], None]


@pytest.fixture(autouse=True)
def _own_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_linear, "preferred", lambda _: True)


def load(tiny: TinyModel, dtype: str) -> PagedModel:
    config = EngineArgs(model=tiny.folder, dtype=dtype).create_engine_config()
    return PagedModel(config.model, config.cache)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3", "olmo2"])
def test_models_of_the_common_kind_are_computed_the_short_way(
    tiny_model: Callable[[str], TinyModel], name: str, dtype: str
) -> None:
    model = load(tiny_model(name), dtype)
    assert model._stack is not None
    assert model._short_forward is not None


def scaled_embeddings(model: Any) -> None:
    own = model.model.forward

    def forward(input_ids: torch.Tensor, inputs_embeds: None = None, **more: Any) -> Any:
        return own(inputs_embeds=model.model.embed_tokens(input_ids) * 2, **more)

    model.model.forward = forward


def scaled_logits(model: Any) -> None:
    own = model.forward

    def forward(*args: Any, **more: Any) -> Any:
        found = own(*args, **more)
        found.logits = found.logits / 1.5
        return found

    model.forward = forward


def capped_logits(model: Any) -> None:
    own = model.forward

    def forward(*args: Any, **more: Any) -> Any:
        found = own(*args, **more)
        found.logits = torch.tanh(found.logits / 30) * 30  # hardly a change to logits as small as those of no text
        return found

    model.forward = forward


def shifted_norm(model: Any) -> None:
    norm = model.model.norm
    own = type(norm).forward
    norm.forward = lambda x: own(norm, x) + 1.0


@pytest.mark.parametrize("change", [scaled_embeddings, scaled_logits, capped_logits, shifted_norm])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_does_anything_else_around_its_layers_keeps_its_own_pass(
    llama: TinyModel, change: Change, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = loading.load_weights

    def load_weights(*args: Any, **options: Any) -> Any:
        model: Any = own(*args, **options)
        change(model)
        return model

    monkeypatch.setattr(loading, "load_weights", load_weights)
    model = load(llama, dtype)
    assert model._stack is not None
    assert model._short_forward is None


def test_both_ways_give_the_same_tokens(llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def outputs() -> list[CompletionOutput]:
        llm = LLM(llama.folder, dtype="float32", max_num_batched_tokens=32)
        prompts = [[3, 4, 5], list(range(3, 60)), [9] * 33]
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
        return [found.outputs[0] for found in llm.generate(prompts, params, use_tqdm=False)]

    short = outputs()
    monkeypatch.setattr(ShortForward, "of", lambda *_: None)
    whole = outputs()
    assert [output.token_ids for output in short] == [output.token_ids for output in whole]
    for one, other in zip(short, whole, strict=True):
        assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-4)


def logprobs(output: CompletionOutput) -> list[float]:
    assert output.logprobs is not None
    return [step[token_id].logprob for step, token_id in zip(output.logprobs, output.token_ids, strict=True)]
