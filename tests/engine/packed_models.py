"""Runs of tiny models whose weights are quantised, with little memory for their keys and values."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

from engine.greedy_runs import greedy_tokens
from headrace_engine.core.engine_core import EngineCore
from headrace_engine.core.runner_factory import create_runner
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.runner.cpu import CPURunner


@cache
def workload() -> list[tuple[list[int], int]]:
    """8 prompts, some of which share 48 tokens, with their max_tokens."""
    draw = random.Random(4)
    prefix = [draw.randrange(3, 160) for _ in range(48)]
    prompts = [[draw.randrange(3, 160) for _ in range(length)] for length in (1, 16, 33, 70)]
    prompts += [[*prefix, *(draw.randrange(3, 160) for _ in range(length))] for length in (0, 1, 7, 30)]
    return [(prompt, draw.choice([6, 10])) for prompt in prompts]


def runner_for(path: Path, dtype: str = "float32", **options: Any) -> CPURunner:
    runner = create_runner(EngineArgs(model=str(path), dtype=dtype, **options).create_engine_config())
    assert isinstance(runner, CPURunner)
    return runner


def load(path: Path, dtype: str = "float32", **options: Any) -> Any:
    """The transformers model with our layers."""
    runner = runner_for(path, dtype, **options)
    runner.load_model()
    return runner._model._model


def generate(path: Path, dtype: str = "float32") -> list[list[int]]:
    """The tokens of the workload with chunks, preemptions and prefix hits forced."""
    options: dict[str, Any] = {
        "block_size": 16,
        "num_blocks": 11,
        "max_num_batched_tokens": 19,
        "max_num_seqs": 6,
        "max_model_len": 96,
    }
    config = EngineArgs(model=str(path), dtype=dtype, attention_backend="native", **options).create_engine_config()
    core = EngineCore(config, create_runner(config))
    return greedy_tokens(core, workload(), least_hits=16)
