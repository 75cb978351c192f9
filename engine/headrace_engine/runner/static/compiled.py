"""Compiler backends that use `torch.compile`: Dynamo traces the step once for each shape, and a backend compiles it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo.backends.registry import lookup_backend
from torch.fx import GraphModule

from headrace_engine.errors import RecompilationError
from headrace_engine.runner.static.compiler_backend import Step

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
