"""The flavour of each device with static shapes."""

from collections.abc import Callable

from headrace_engine.runner.static.flavour import EagerCPU, Flavour
from headrace_engine.runner.static.neuron import Neuron
from headrace_engine.runner.static.xla import XLA

_FLAVOURS: dict[str, Callable[[], Flavour]] = {"neuron": Neuron, "xla": XLA, "static-cpu": EagerCPU}


def create_flavour(device: str) -> Flavour:
    """The flavour of one of `STATIC_DEVICES`; whether the device is there is what its `probe` tells."""
    return _FLAVOURS[device]()
