"""Inferentia 2 and Trainium 1 through PyTorch/XLA, whose last release for Neuron is 2.9.

Tensors are lazy: the step only records operations, and `sync` compiles them unless they are known already. Never run on
hardware. `make test-xla` runs the same code on XLA's CPU client.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from headrace_engine.errors import ConfigError, RecompilationError
from headrace_engine.runner.static.compiler_backend import Step


class XLA:
    """One XLA device.

    Args:
        hardware: the kind of device that must exist, by PJRT's name.
    """

    name = "xla"
    collectives: str | None = None

    def __init__(self, hardware: str = "NEURON") -> None:
        self._hardware = hardware
        self._xla: Any = None
        self._metrics: Any = None
        self._compiled_before = 0

    def probe(self) -> None:
        chosen = os.environ.setdefault("PJRT_DEVICE", self._hardware)
        if chosen != self._hardware:
            raise ConfigError(f"device xla needs PJRT_DEVICE={self._hardware}, got {chosen}")
        try:
            import torch_xla
            import torch_xla.core.xla_model as xla_model
            import torch_xla.debug.metrics as metrics
        except ImportError as error:
            raise ConfigError(
                f"device xla needs PyTorch/XLA, which cannot be imported ({error}). Install torch-neuronx 2.9 and "
                "torch-xla 2.9 from AWS's repository"
            ) from error
        try:
            # the actual device: `runtime.device_type` only repeats the environment
            found = xla_model.xla_device_hw(torch_xla.device())
        except (ImportError, RuntimeError, OSError) as error:
            raise ConfigError(f"device xla finds no {self._hardware} device: {error}") from error
        if found != self._hardware:
            # without the Neuron plugin, PyTorch/XLA uses the CPU and only logs it
            raise ConfigError(f"device xla finds no {self._hardware} device, PyTorch/XLA offers {found}")
        self._xla, self._metrics = torch_xla, metrics

    @property
    def device(self) -> torch.device:
        device: torch.device = self._xla.device()
        return device

    def compile(self, step: torch.nn.Module, num_shapes: int) -> Step:  # noqa: ARG002
        self._xla.sync()  # pending operations of the load are not a graph of a step
        self._compiled_before = self._num_compilations()

        def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            output: tuple[torch.Tensor, torch.Tensor] = step.forward(*inputs)
            self._xla.sync()
            return output

        return run

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()

    def num_graphs(self) -> int:
        return self._num_compilations() - self._compiled_before

    def _num_compilations(self) -> int:
        count: int = self._metrics.counter_value("UncachedCompile") or 0
        return count

    def sealed(self) -> AbstractContextManager[object]:
        return self._watch()

    @contextmanager
    def _watch(self) -> Iterator[None]:
        before = self._num_compilations()
        yield
        if self._num_compilations() != before:
            raise RecompilationError("xla compiled a graph for a shape that was not compiled at the start")

    def fallback_operators(self) -> list[str]:
        """Return the operators without a lowering. PyTorch/XLA runs them on the CPU silently."""
        found = sorted(name for name in self._metrics.counter_names() if name.startswith("aten::"))
        # reading a value is not a computation
        return [name for name in found if name != "aten::_local_scalar_dense"]

    def free_memory(self) -> int | None:
        return None
