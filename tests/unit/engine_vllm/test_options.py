"""Headrace's options become vLLM's, or are refused by name. Without vLLM."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from headrace_engine.errors import ConfigError
from headrace_engine.options.config import EngineConfig
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine_vllm.options import vllm_options


def config(**given: Any) -> EngineConfig:
    return EngineArgs(model="m", engine="vllm", **given).create_engine_config()


def options(**given: Any) -> dict[str, Any]:
    return vllm_options(config(**given))


@pytest.mark.parametrize(
    ("given", "vllms"),
    [
        ({"dtype": "float16"}, {"dtype": "float16"}),
        ({"dtype": "half"}, {"dtype": "half"}),
        ({"max_model_len": -1}, {"max_model_len": -1}),
        ({"max_num_seqs": 7}, {"max_num_seqs": 7}),
        ({"max_num_batched_tokens": 300}, {"max_num_batched_tokens": 300}),
        ({"kv_cache_memory": 1 << 30}, {"kv_cache_memory_bytes": 1 << 30}),
        ({"num_blocks": 50}, {"num_gpu_blocks_override": 50}),
        ({"kv_cache_dtype": "fp8_e5m2"}, {"kv_cache_dtype": "fp8_e5m2"}),
        ({"quantization": "awq"}, {"quantization": "awq"}),
        ({"scheduling_policy": "priority"}, {"scheduling_policy": "priority"}),
        ({"tensor_parallel_size": 2}, {"tensor_parallel_size": 2}),
        ({"enforce_eager": True}, {"enforce_eager": True}),
        ({"async_scheduling": True}, {"async_scheduling": True}),
        ({"watermark": 0.05}, {"watermark": 0.05}),
        (
            {"speculative_config": {"method": "eagle", "model": "e", "num_speculative_tokens": 3}},
            {"speculative_config": {"method": "eagle", "model": "e", "num_speculative_tokens": 3}},
        ),
        ({"engine_args": {"gpu_memory_utilization": 0.5}}, {"gpu_memory_utilization": 0.5}),
        ({"enforce_eager": True, "engine_args": {"enforce_eager": False}}, {"enforce_eager": False}),
        ({"engine_args": {"data_parallel_size": 1}}, {"data_parallel_size": 1}),
    ],
)
def test_an_option_of_both_keeps_its_meaning(given: dict[str, Any], vllms: dict[str, Any]) -> None:
    assert vllms.items() <= options(**given).items()


def test_what_nobody_gave_is_left_to_vllm() -> None:
    given = options()
    for name in ("max_num_batched_tokens", "async_scheduling", "kv_cache_memory_bytes", "max_model_len", "block_size"):
        assert name not in given


def test_grammars_are_compiled_by_the_library_that_checked_them() -> None:
    assert options()["structured_outputs_config"] == {"backend": "guidance"}
    compact = options(engine_args={"structured_outputs_config": {"disable_any_whitespace": True}})
    assert compact["structured_outputs_config"] == {"disable_any_whitespace": True, "backend": "guidance"}


@pytest.mark.parametrize(("given", "vllms"), [(1, 1), (4, 8), (16, 16), (17, 32), (300, 320)])
def test_the_largest_rank_of_adapters_is_rounded_up_to_one_that_vllm_takes(given: int, vllms: int) -> None:
    assert options(enable_lora=True, max_lora_rank=given)["max_lora_rank"] == vllms


def test_vllm_has_room_for_one_adapter_more_than_headrace_keeps() -> None:
    assert options(enable_lora=True, max_loras=2, max_cpu_loras=3)["max_cpu_loras"] == 4


@pytest.mark.parametrize(
    "given",
    [
        {"device": "cpu"},
        {"prefill_buckets": [16]},
        {"decode_buckets": [16]},
        {"context_buckets": [16]},
        {"compile_cache_dir": "/cache"},
        {"block_size": 16},
        {"attention_backend": "native"},
        {"quantization": "int8"},
        {"logits_processors": ["somewhere.Processor"]},
        {"enable_lora": True, "max_lora_rank": 513},
        {"tensor_parallel_size": 0},
        {"tensor_parallel_size": True},
    ],
)
def test_an_option_that_vllm_has_not_is_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=[*given][-1]):
        config(**given)


@pytest.mark.parametrize(
    "engine_args",
    [
        {"scheduler_cls": "a.B"},
        {"worker_extension_cls": "a.B"},
        {"disable_log_stats": True},
        {"data_parallel_size": 2},
        {"data_parallel_rank": 0},
        {"reasoning_parser": "deepseek_r1"},
        {"distributed_executor_backend": "external_launcher"},
        {"structured_outputs_config": {"backend": "xgrammar"}},
        {"structured_outputs_config": "xgrammar"},
        {"enable_lora": True},
        {"max_logprobs": 5},
        {"model": "other"},
        {"dtype": "float16"},
        {"max_num_seqs": 512},
        {"enable_prefix_caching": True},
        {"kv_cache_memory_bytes": 1 << 30},
        {"logprobs_mode": "processed_logprobs"},
    ],
)
def test_an_engine_arg_that_headrace_needs_is_refused_by_name(engine_args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"engine_args.{next(iter(engine_args))}|contains {next(iter(engine_args))}"):
        config(engine_args=engine_args)


def test_the_name_that_headrace_has_for_an_engine_arg_is_told() -> None:
    with pytest.raises(ConfigError, match="give it as the option kv_cache_memory instead"):
        config(engine_args={"kv_cache_memory_bytes": 1 << 30})


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        config(device="cuda", engine_args={"data_parallel_size": 4, "scheduler_cls": "a.B"})
    for name in ("device", "data_parallel_size", "scheduler_cls"):
        assert name in str(caught.value)


def test_the_parent_imports_neither_torch_nor_vllm() -> None:
    program = "import sys, headrace_engine_vllm; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()).isdisjoint(("torch", "vllm", "transformers", "numpy"))
