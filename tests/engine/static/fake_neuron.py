"""TorchNeuron without a device: a Dynamo backend of its name that computes on the CPU, and its compiler backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._dynamo.backends.registry import _BACKENDS, _COMPILER_FNS, register_backend

from engine.static.traced_graphs import Graph, keep_graphs
from headrace_engine.runner.static.neuron import Neuron


class NeuronOnCPU(Neuron):
    """Everything of the real one but its device and its collectives."""

    collectives = "gloo"

    def probe(self) -> None:
        """The CPU is always there."""


@contextmanager
def fake_backend() -> Iterator[list[Graph]]:
    """Inside, `torch.compile` knows a backend "neuron"; collects what it is given to compile."""
    graphs: list[Graph] = []
    register_backend(keep_graphs(graphs), name="neuron")
    try:
        yield graphs
    finally:
        for registry in (_BACKENDS, _COMPILER_FNS):
            registry.pop("neuron", None)
