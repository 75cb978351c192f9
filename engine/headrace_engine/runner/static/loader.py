"""Creates the runner of a device with static shapes."""

from headrace_engine.options.config import EngineConfig
from headrace_engine.runner.static.devices import create_compiler_backend
from headrace_engine.runner.static.runner import StaticPagedRunner


def create_static_runner(config: EngineConfig) -> StaticPagedRunner:
    """Create the runner. Raises ConfigError if the device does not exist."""
    return StaticPagedRunner(config, create_compiler_backend(config.model.device))
