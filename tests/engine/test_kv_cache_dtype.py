"""Keys and values in bfloat16 under a float32 model: half the memory, the same engine, a known loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.perplexity import perplexity, prompts
from engine.tiny_models import TinyModel
from headrace_engine import LLM, SamplingParams
from headrace_engine.errors import ConfigError
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.runner.cpu import CPURunner
from headrace_engine.runner.models.paged_model import PagedModel

pytestmark = pytest.mark.rotated(
    "engine/headrace_engine/runner/attention",
    "engine/headrace_engine/runner/models",
    "engine/headrace_engine/runner/memory.py",
)

OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 16, "max_model_len": 64}
both_backends = pytest.mark.parametrize("backend", ["native", "torch"])


@both_backends
def test_a_float32_model_holds_twice_the_tokens_in_the_same_memory(
    tiny_model: Callable[[str], TinyModel], backend: str
) -> None:
    def bytes_per_block(**options: str) -> int:
        args = EngineArgs(model=tiny_model("llama").folder, attention_backend=backend, **options)
        config = args.create_engine_config()
        return PagedModel(config.model, config.cache).bytes_per_block

    exact = bytes_per_block(dtype="float32")
    assert bytes_per_block(dtype="float32", kv_cache_dtype="bfloat16") * 2 == exact
    kept = bytes_per_block(dtype="bfloat16")
    assert bytes_per_block(dtype="bfloat16", kv_cache_dtype="bfloat16") == kept


# Llama's layers are computed in one call; Gemma's one by one, with windows and softcap.
@both_backends
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_in_company_and_under_memory_pressure_a_request_gets_what_it_gets_alone(
    tiny_model: Callable[[str], TinyModel], name: str, backend: str
) -> None:
    # Where a sum's last bit depends on the company, that bit may decide how a key or value is rounded.
    invariant = {"batch_invariant": backend == "native"}
    options = OPTIONS | invariant | {"kv_cache_dtype": "bfloat16", "attention_backend": backend}
    requests = [[5, 9, 200, 31] * 8 + [i] for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    crowded = LLM(tiny_model(name).folder, num_blocks=14, **options)
    alone = LLM(tiny_model(name).folder, num_blocks=40, max_num_seqs=1, enable_prefix_caching=False, **options)
    for prompt, output in zip(requests, crowded.generate(requests, params, use_tqdm=False), strict=True):
        assert alone.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids == output.outputs[0].token_ids


def test_the_draft_model_keeps_its_own_in_it_too(tiny_model: Callable[[str], TinyModel]) -> None:
    folder = tiny_model("llama").folder
    drafts = {"method": "draft_model", "model": folder, "num_speculative_tokens": 3}

    def bytes_per_block(kv_cache_dtype: str) -> int:
        args = EngineArgs(model=folder, kv_cache_dtype=kv_cache_dtype, speculative_config=drafts, **OPTIONS)
        runner = CPURunner(args.create_engine_config())
        runner.load_model()
        return runner.kv_spec().bytes_per_block  # of both models

    assert bytes_per_block("bfloat16") * 2 == bytes_per_block("auto")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype must be one of auto, bfloat16, fp8, got 'int4'"),
        ({"kv_cache_dtype": "fp8"}, "device must be one of cuda with kv_cache_dtype fp8, got auto"),
        ({"kv_cache_dtype": "fp8", "device": "cpu"}, "device must be one of cuda with kv_cache_dtype fp8, got cpu"),
        (
            {"kv_cache_dtype": "bfloat16", "device": "static-cpu"},
            "device must be one of auto, cpu, cuda with kv_cache_dtype bfloat16, got static-cpu",
        ),
        ({"device": "tpu"}, "^device must be one of [^;]*, got 'tpu'$"),
    ],
)
def test_what_cannot_be_is_refused_at_the_door(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs(model="m", **options).create_engine_config()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16", "fp8"])
def test_a_gpu_keeps_them_in_every_type(kv_cache_dtype: str) -> None:
    config = EngineArgs(model="m", device="cuda", kv_cache_dtype=kv_cache_dtype).create_engine_config()
    assert config.cache.kv_cache_dtype == kv_cache_dtype


def test_the_real_model_loses_next_to_no_quality(default_model_in: Callable[[str], Path]) -> None:
    """Perplexity on prompts of the benchmark; the figure on more of them is in benchmarks/results/2026-11-23.md."""
    texts = prompts(3)
    model = str(default_model_in("bfloat16"))
    exact = perplexity(LLM(model, dtype="float32"), texts)
    rounded = perplexity(LLM(model, dtype="float32", kv_cache_dtype="bfloat16"), texts)
    assert rounded != exact
    assert abs(rounded / exact - 1) < 0.005
