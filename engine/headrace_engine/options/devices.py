"""`Device`: the static properties of the devices of Headrace's own engine. Imports no torch."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device on which a runner computes. The field `devices` of each option lists the devices that support it."""

    name: str
    token_budget: int = 2048
    """Maximum tokens of one step. The user may set another value."""
    pooling_token_budget: int = 1024
    """The same for a model that embeds or scores."""
    is_static: bool = False
    """Its compiler needs all shapes in advance: see `StaticConfig`."""
    graph_cache_variable: str | None = None
    """Environment variable with the folder of compiled graphs. The compiler reads it when torch is imported."""
    has_core_per_rank: bool = False
    """Whether an environment variable selects the core of each rank."""


_ALL: Final = (
    # larger steps mainly add latency on a CPU
    Device(name="auto", token_budget=512),
    Device(name="cpu", token_budget=512),
    Device(name="cuda", pooling_token_budget=16384),
    Device(name="neuron", is_static=True, graph_cache_variable="TORCH_NEURONX_NEFF_CACHE_DIR", has_core_per_rank=True),
    Device(name="xla", is_static=True, graph_cache_variable="NEURON_COMPILE_CACHE_URL"),
    Device(name="static-cpu", is_static=True),
)
DEVICES: Final = {device.name: device for device in _ALL}
"""auto: the CPU. neuron: Trainium 2 and later by TorchNeuron. xla: Inferentia 2 and Trainium 1 by PyTorch/XLA.
static-cpu: the same step on the CPU without compilation, for debugging without a device."""
STATIC_DEVICES: Final = tuple(device.name for device in _ALL if device.is_static)
EAGER_DEVICES: Final = tuple(device.name for device in _ALL if not device.is_static)
"""The devices that compute without compiled graphs of fixed shapes."""
