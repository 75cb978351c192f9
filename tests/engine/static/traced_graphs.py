"""A Dynamo backend without a device: it checks and keeps what a real compiler would be given, and runs it on the CPU.

What passes here is static and holds no operator that is known to fail or to be slow on Neuron. Whether neuronx-cc
takes it is known only once it has.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.fx import GraphModule, Node

BANNED = {
    "sort": "sort is not supported, or becomes a top-k over the whole vocabulary",
    "argsort": "as sort",
    "topk": "allowed up to 16384 elements",
    "nonzero": "its shape depends on values",
    "unique": "its shape depends on values",
    "_unique2": "its shape depends on values",
    "masked_select": "its shape depends on values",
    "_local_scalar_dense": "it stops the graph to read a value",
    "searchsorted": "it is not lowered",
    **dict.fromkeys(
        ("rand", "randn", "randint", "rand_like", "randn_like", "bernoulli", "multinomial", "exponential"),
        "randomness comes from the host",
    ),
}
"""Operators that must not stand in a graph, and why."""

_MOST_CANDIDATES = 16384
# Where 64-bit indices are known to give wrong results; the position of the index among the arguments.
_INDEX_ARGUMENT = {"index_select": 2, "gather": 2, "embedding": 1, "index_put": 1, "index": 1}


@dataclass(frozen=True, slots=True)
class Graph:
    """One graph as a compiler gets it."""

    module: GraphModule

    def operators(self) -> Counter[str]:
        """How often each operator stands in it, as `aten.mm.default`."""
        return Counter(str(node.target) for node in self._calls())

    def problems(self) -> Iterator[str]:
        """What a device with static shapes would refuse or get wrong."""
        for node in self._calls():
            name = str(node.target).split(".")[1] if "." in str(node.target) else str(node.target)
            if name in BANNED and not (name == "topk" and int(node.args[1]) <= _MOST_CANDIDATES):  # type: ignore[arg-type]
                yield f"{node.target}: {BANNED[name]}"
            if name in _INDEX_ARGUMENT:
                for index in _tensors(node.args[_INDEX_ARGUMENT[name]]):
                    if index.dtype != torch.int32:
                        yield f"{node.target}: its index is {index.dtype}, must be torch.int32"
            for value in _tensors(node):
                if value.dtype == torch.float64:
                    yield f"{node.target}: it is in float64, which the device does not have"
                if not all(isinstance(size, int) for size in value.shape):
                    yield f"{node.target}: its shape {tuple(value.shape)} is not static"

    def _calls(self) -> Iterator[Node]:
        return (node for node in self.module.graph.nodes if node.op == "call_function")


def keep_graphs(graphs: list[Graph]) -> Callable[..., Any]:
    """A backend for `torch.compile` that appends what it is given to `graphs`, and computes it on the CPU."""

    def compile_graph(module: GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(Graph(module))
        return make_boxed_func(module.forward)

    backend: Callable[..., Any] = aot_autograd(fw_compiler=compile_graph, keep_inference_input_mutations=True)
    return backend


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The traced values of an argument or a node; where they are none, nothing."""
    if isinstance(value, Node):
        value = value.meta.get("val")
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
