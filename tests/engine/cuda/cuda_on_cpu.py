"""The GPU's runner where there is no GPU: the same class on the CPU, with padded steps but no graphs."""

from __future__ import annotations

from typing import Any

import torch

from engine.tiny_models import TinyModel
from headrace_engine.core.engine_core import EngineCore
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.runner.cuda.runner import CUDARunner


def make_core(
    model: TinyModel,
    *,
    enforce_eager: bool = False,
    async_scheduling: bool = False,
    kv_cache_dtype: str = "auto",
    **options: Any,
) -> EngineCore:
    args = {"device": "cpu", "dtype": "float32", "block_size": 16, "num_blocks": 150, "max_model_len": 112, **options}
    config = EngineArgs(model=model.folder, **args).create_engine_config()
    config.model.enforce_eager = enforce_eager
    config.scheduler.async_scheduling = async_scheduling
    config.cache.kv_cache_dtype = kv_cache_dtype
    return EngineCore(config, CUDARunner(config, torch.device("cpu")))
