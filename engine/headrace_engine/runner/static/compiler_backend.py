"""`CompilerBackend`: places a static step on a device, compiles it, and detects unexpected compilations."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo.backends.registry import lookup_backend
from torch.fx import GraphModule

from headrace_engine.errors import RecompilationError

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""The forward pass of a step, compiled or not."""


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


_SEALED = "fail_on_recompile"


class Compiled:
    """A device with a Dynamo backend named `backend`. Subclasses find out whether the device exists."""

    name: str
    backend: str
    collectives: str | None
    device: torch.device

    def __init__(self) -> None:
        self._num_graphs = 0

    def compile(self, step: torch.nn.Module, num_shapes: int) -> Step:
        # Dynamo gives up after 8 graphs of one function by default. All runners of a process share the limit.
        dynamo_config.recompile_limit += num_shapes
        dynamo_config.accumulated_recompile_limit += num_shapes
        compiled: Step = torch.compile(step.forward, backend=self._build, fullgraph=True, dynamic=False)
        return compiled

    def _build(self, module: GraphModule, inputs: list[torch.Tensor]) -> Any:
        """Compile a graph as `torch.compile(backend=self.backend)` does, and count it."""
        self._num_graphs += 1
        return lookup_backend(self.backend)(module, inputs)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()

    def num_graphs(self) -> int:
        return self._num_graphs

    def sealed(self) -> AbstractContextManager[object]:
        return self._refuse_recompilation()

    @contextmanager
    def _refuse_recompilation(self) -> Iterator[None]:
        try:
            with torch.compiler.set_stance(_SEALED):
                yield
        except RuntimeError as error:
            if _SEALED not in str(error):  # torch has no exception type for it
                raise
            raise RecompilationError(f"{self.name} met a shape that was not compiled at the start: {error}") from error
