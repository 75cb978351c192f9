"""Makes the runner of a device with static shapes."""

from collections.abc import Callable

from headrace_engine.config import EngineConfig
from headrace_engine.runner.static.flavour import EagerCPU, Flavour
from headrace_engine.runner.static.neuron import Neuron
from headrace_engine.runner.static.runner import StaticPagedRunner
from headrace_engine.runner.static.xla import XLA

_FLAVOURS: dict[str, Callable[[], Flavour]] = {"neuron": Neuron, "xla": XLA, "static-cpu": EagerCPU}


def create_static_runner(config: EngineConfig) -> StaticPagedRunner:
    """Raises ConfigError: the device is not there."""
    return StaticPagedRunner(config, _FLAVOURS[config.model.device]())
