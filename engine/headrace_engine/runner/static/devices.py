"""The compiler backend of each device with static shapes."""

from collections.abc import Callable

from headrace_engine.runner.static.compiler_backend import CompilerBackend, EagerCPU
from headrace_engine.runner.static.neuron import Neuron
from headrace_engine.runner.static.xla import XLA

_FLAVOURS: dict[str, Callable[[], CompilerBackend]] = {"neuron": Neuron, "xla": XLA, "static-cpu": EagerCPU}


def create_compiler_backend(device: str) -> CompilerBackend:
    """Return the compiler backend of one of `STATIC_DEVICES`. Its `probe` checks whether the device exists."""
    return _FLAVOURS[device]()
