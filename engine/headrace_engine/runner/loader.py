"""Chooses the runner for a device. Imports torch only then, so that a device's environment can be set before."""

import os
import sys

from headrace_engine.config import EngineConfig
from headrace_engine.errors import ConfigError
from headrace_engine.own_engine import DEVICES
from headrace_engine.runner.contracts import ModelRunner
from headrace_engine.static_config import STATIC_DEVICES


def create_runner(config: EngineConfig) -> ModelRunner:
    """The runner that the config's device asks for; its model is not loaded yet.

    Raises:
        ConfigError: no runner serves this device, or the device is not there.
    """
    device = config.model.device
    if device in STATIC_DEVICES:
        config.static.prepare_environment(device, 0, os.environ, is_torch_imported="torch" in sys.modules)
        from headrace_engine.runner.static.loader import create_static_runner

        return create_static_runner(config)
    if device == "cuda":
        from headrace_engine.runner.cuda.device import find_device, keep_kernels_private
        from headrace_engine.runner.cuda.runner import CUDARunner

        keep_kernels_private()
        return CUDARunner(config, find_device())
    if device not in ("auto", "cpu"):
        raise ConfigError(f"device {device!r} is not supported; allowed are {', '.join(DEVICES)}")
    from headrace_engine.runner.cpu import CPURunner

    return CPURunner(config)
