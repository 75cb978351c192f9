"""AWS Trainium 2 and later through TorchNeuron: the PyTorch device `neuron` and the Dynamo backend of the same name.

Written from AWS's documentation of SDK 2.33, and never run on hardware. `docs/neuron.md` says what is tested.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.backends.registry import list_backends

from headrace_engine.errors import ConfigError
from headrace_engine.runner.static.compiler_backend import Compiled, Step

# Share of the memory left after the weights that K/V may take. Graphs and their scratch memory need the rest.
_KV_SHARE = 0.7


class Neuron(Compiled):
    """One logical NeuronCore.

    Args:
        devices: folder in which the driver lists its devices.
        load: imports a module by name.
    """

    name = "neuron"
    backend = "neuron"
    collectives: str | None = "neuron"
    device = torch.device("cpu")  # until `probe` has found the device

    def __init__(self, devices: Path = Path("/dev"), load: Callable[[str], Any] = import_module) -> None:
        super().__init__()
        self._devices = devices
        self._load = load
        self._module: Any = None

    def probe(self) -> None:
        if not any(self._devices.glob("neuron[0-9]*")):
            raise ConfigError(
                f"device neuron was not found: {self._devices} has no neuron0. Run on a Trn2 or Trn3 instance with "
                "AWS's driver, and give containers the device (--device /dev/neuron0)"
            )
        try:
            self._module = self._load("torch_neuronx")
        except ImportError as error:
            raise ConfigError(
                f"device neuron needs TorchNeuron, which cannot be imported ({error}). Install torch-neuronx from "
                "AWS's own repository: the package of this name on PyPI is an empty placeholder"
            ) from error
        if self.backend not in list_backends(exclude_tags=None):
            raise ConfigError(
                "the installed torch_neuronx brings no torch.compile backend 'neuron': it is not TorchNeuron "
                "(SDK 2.33 or newer). Older devices are served by device xla"
            )
        try:
            device = torch.device("neuron")
            torch.empty(1, device=device)
        except RuntimeError as error:
            raise ConfigError(f"device neuron does not respond: {error}") from error
        self.device = device

    def compile(self, step: torch.nn.Module, num_shapes: int) -> Step:
        # operators that ran on the CPU during loading do not count
        forget = getattr(self._module, "clear_op_tracking", None)
        if forget is not None:
            forget()
        return super().compile(step, num_shapes)

    def fallback_operators(self) -> list[str]:
        """Return the operators that TorchNeuron ran on the CPU, which it does silently."""
        fallbacks = getattr(self._module, "get_fallback_ops", None)
        return sorted(map(str, fallbacks())) if fallbacks is not None else []

    def free_memory(self) -> int | None:
        try:
            free, _ = torch.accelerator.get_memory_info(self.device)
        except (RuntimeError, NotImplementedError, AttributeError, ValueError):
            return None  # beta versions do not report it, nor do builds of torch for another accelerator
        return int(free * _KV_SHARE)
