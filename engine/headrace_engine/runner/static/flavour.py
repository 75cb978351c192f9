"""How a static step reaches a device: placed, compiled, run, and watched for compilations that nobody asked for."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""`StaticDecoder.forward`, compiled or not."""


class Flavour(Protocol):
    """A device and its compiler."""

    name: str
    collectives: str | None
    """torch.distributed's backend for sums over ranks; None where there can be one rank only."""

    def probe(self) -> None:
        """Raises ConfigError, saying what is missing; never goes on with another device."""

    @property
    def device(self) -> torch.device: ...

    def compile(self, step: torch.nn.Module, num_shapes: int) -> Step:
        """The step as it is to be called with `num_shapes` different shapes."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Wait for the device and copy."""

    def num_graphs(self) -> int:
        """Graphs compiled so far for this runner."""

    def sealed(self) -> AbstractContextManager[object]:
        """Inside, a shape that was not compiled before raises RecompilationError."""

    def fallback_operators(self) -> list[str]:
        """The operators that were computed elsewhere than on the device, by name."""

    def free_memory(self) -> int | None:
        """Bytes free for K/V memory; None where the device does not tell."""


class EagerCPU:
    """Plain PyTorch on the CPU, nothing compiled: for tests, and to look for a fault without a device."""

    name = "static-cpu"
    collectives: str | None = "gloo"

    def probe(self) -> None:
        """The CPU is always there."""

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
        return []  # there is nowhere else to compute

    def free_memory(self) -> int | None:
        return 1 << 30  # a debugging aid needs no more
