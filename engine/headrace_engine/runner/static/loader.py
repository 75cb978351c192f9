"""Makes the runner of a device with static shapes."""

from headrace_engine.config import EngineConfig
from headrace_engine.runner.static.devices import create_flavour
from headrace_engine.runner.static.runner import StaticPagedRunner


def create_static_runner(config: EngineConfig) -> StaticPagedRunner:
    """Raises ConfigError: the device is not there."""
    return StaticPagedRunner(config, create_flavour(config.model.device))
