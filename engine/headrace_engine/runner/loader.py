"""Chooses the runner for a device."""

from headrace_engine.config import EngineConfig
from headrace_engine.errors import ConfigError
from headrace_engine.runner.contracts import ModelRunner
from headrace_engine.runner.cpu import CPURunner


def create_runner(config: EngineConfig) -> ModelRunner:
    """The runner that the config's device asks for; its model is not loaded yet.

    Raises:
        ConfigError: no runner serves this device.
    """
    if config.model.device not in ("auto", "cpu"):
        raise ConfigError(f"device {config.model.device!r} is not supported; allowed are auto and cpu")
    return CPURunner(config)
