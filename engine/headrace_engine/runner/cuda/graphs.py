"""CUDA graphs of decode steps: one for each batch size. One call launches all kernels of a forward pass."""

import bisect
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace_engine.errors import ConfigError
from headrace_engine.runner.batch import StepInputs
from headrace_engine.runner.cuda.device import is_gpu

logger = logging.getLogger(__name__)

_WARM_RUNS = 2
"""Runs before a capture: Triton compiles and cuBLAS allocates its workspace, which must not happen in a graph."""


class DecodeGraphs:
    """Runs decode steps of fixed sizes. On a device without graphs it runs the operations one by one.

    Args:
        max_num_seqs: maximum number of sequences.
        padding: returns a step with a given number of padding sequences. Its tensors have the addresses of every later
            step of this size.
        forward: computes the logits of a step on the device.
    """

    def __init__(
        self,
        max_num_seqs: int,
        padding: Callable[[int], StepInputs],
        forward: Callable[[StepInputs], torch.Tensor],
        device: torch.device,
    ) -> None:
        self._sizes = graph_sizes(max_num_seqs)
        self._padding = padding
        self._forward = forward
        self._device = device
        self._graphs: dict[int, _Captured] = {}

    def size_for(self, num_seqs: int) -> int:
        """Return the smallest size for a number of sequences."""
        return self._sizes[bisect.bisect_left(self._sizes, num_seqs)]

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def capture(self) -> None:
        """Capture the graphs, the largest first: the smaller ones share its memory.

        Raises:
            ConfigError: a graph cannot hold an operation of the model, such as reading a value on the host.
        """
        if not is_gpu(self._device):
            return
        started = time.perf_counter()
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        for size in reversed(self._sizes):
            inputs = self._padding(size)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_RUNS):
                    self._forward(inputs)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=pool):
                    logits = self._forward(inputs)
            except RuntimeError as error:
                raise ConfigError(
                    f"the model's decoding step cannot be captured as a CUDA graph ({str(error).splitlines()[0]}): "
                    "set enforce_eager to run it without graphs"
                ) from error
            self._graphs[size] = _Captured(graph, logits, inputs)
        torch.cuda.synchronize(self._device)
        logger.info("%d CUDA graphs captured in %.1f s", len(self._graphs), time.perf_counter() - started)

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Return the logits of a padded step. They are valid until the next run."""
        if not is_gpu(self._device):
            return self._forward(inputs)
        captured = self._graphs[len(inputs.input_ids)]
        assert captured.inputs.input_ids.data_ptr() == inputs.input_ids.data_ptr(), "a graph reads another step"
        captured.graph.replay()
        return captured.logits


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    inputs: StepInputs


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return 1, 2, 4, then multiples of 8 up to 256, then multiples of 16. The last size is `max_num_seqs`."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, max_num_seqs + 16, 16)]
    smaller = [size for size in sizes if size < max_num_seqs]
    return [*smaller, max_num_seqs]
