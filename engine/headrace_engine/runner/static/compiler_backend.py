"""`CompilerBackend`: places a static step on a device, compiles it, and detects unexpected compilations."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""`StaticDecoder.forward`, compiled or not."""


class CompilerBackend(Protocol):
    """A device and its compiler."""

    name: str
    collectives: str | None
    """The backend of torch.distributed for sums over ranks. None: the device supports one rank only."""

    def probe(self) -> None:
        """Raise ConfigError that says what is missing. Never fall back to another device."""

    @property
    def device(self) -> torch.device: ...

    def compile(self, step: torch.nn.Module, num_shapes: int) -> Step:
        """Return the compiled step, to be called with `num_shapes` different shapes."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Wait for the device and copy the tensor to the host."""

    def num_graphs(self) -> int:
        """Return the number of graphs compiled for this runner."""

    def sealed(self) -> AbstractContextManager[object]:
        """Within the block, a new shape raises RecompilationError."""

    def fallback_operators(self) -> list[str]:
        """Return the names of the operators that did not run on the device."""

    def free_memory(self) -> int | None:
        """Return the free bytes for K/V memory, or None if the device does not report them."""


class EagerCPU:
    """Plain PyTorch on the CPU without compilation, for tests and for debugging without a device."""

    name = "static-cpu"
    collectives: str | None = "gloo"

    def probe(self) -> None:
        """Do nothing: the CPU always exists."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def compile(self, step: torch.nn.Module, num_shapes: int) -> Step:  # noqa: ARG002
        return step.forward

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def num_graphs(self) -> int:
        return 0

    def sealed(self) -> AbstractContextManager[object]:
        return nullcontext()

    def fallback_operators(self) -> list[str]:
        return []  # everything runs on the CPU

    def free_memory(self) -> int | None:
        return 1 << 30  # enough for debugging
