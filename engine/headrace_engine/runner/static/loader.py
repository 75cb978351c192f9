"""Makes the runner of a device with static shapes."""

from headrace_engine.config import EngineConfig
from headrace_engine.runner.static.flavour import EagerCPU, Flavour
from headrace_engine.runner.static.runner import StaticPagedRunner


def create_static_runner(config: EngineConfig) -> StaticPagedRunner:
    """Raises ConfigError: the device is not there."""
    return StaticPagedRunner(config, _flavour(config.model.device))


def _flavour(device: str) -> Flavour:
    assert device == "static-cpu", device
    return EagerCPU()
