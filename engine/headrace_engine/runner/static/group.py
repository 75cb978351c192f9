"""Tensor parallelism with one process for each rank. Rank 0 schedules, and broadcasts the inputs of each step.

    rank 0    [kind, rows, tokens, blocks]  then the three input tensors  ->  all others, by gloo's broadcast

Within a step, the ranks sum their parts by the collectives of the device. Only rank 0 chooses shapes, so all ranks run
the same graphs.
"""

import os
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from typing import Any

import msgpack
import torch
import torch.distributed as dist

from headrace_engine.errors import ConfigError
from headrace_engine.options.config import EngineConfig
from headrace_engine.runner.static.shapes import Shape, StaticInputs, empty_inputs

# An idle rank waits for the next step without a limit. A dead rank is noticed at once by its closed connection.
_TIMEOUT = timedelta(days=365)
READY = b"ready\n"


class Kind(IntEnum):
    """The command for the other ranks."""

    STOP = 0
    ALLOCATE = 1
    """Allocate K/V memory for a number of blocks, and compile for a number of shapes."""
    WARM_UP = 2
    STEP = 3


class Group:
    """One rank's connection to all ranks.

    Args:
        backend: the backend of torch.distributed for the collectives within a step.
    """

    def __init__(self, rank: int, size: int, backend: str, store: Any) -> None:
        self.rank, self.size = rank, size
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
        self._host = dist.new_group(backend="gloo", timeout=_TIMEOUT)

    def reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks. Within a graph it becomes a functional collective."""
        dist.all_reduce(part)
        return part

    def announce(self, kind: Kind, first: int = 0, second: int = 0, third: int = 0) -> None:
        """Send a command from rank 0 to all others."""
        dist.broadcast(torch.tensor([kind, first, second, third]), 0, group=self._host)

    def send(self, kind: Kind, inputs: StaticInputs) -> None:
        """Send a step from rank 0 to all others."""
        _, rows, tokens = inputs.tokens.shape
        self.announce(kind, rows, tokens, inputs.rows.shape[1] - 2)
        self._exchange(inputs)

    def receive(self) -> tuple[Kind, int, int, StaticInputs | None]:
        """Receive a command of rank 0: the kind, its first two numbers, and the inputs if it is a step."""
        header = torch.zeros(4, dtype=torch.int64)
        dist.broadcast(header, 0, group=self._host)
        kind, first, second, third = header.tolist()
        if kind not in (Kind.WARM_UP, Kind.STEP):
            return Kind(kind), first, second, None
        inputs = empty_inputs(Shape(first, second, third))
        self._exchange(inputs)
        return Kind(kind), first, second, inputs

    def _exchange(self, inputs: StaticInputs) -> None:
        for tensor in (inputs.tokens, inputs.rows, inputs.sampling_values):
            dist.broadcast(tensor, 0, group=self._host)

    def close(self) -> None:
        dist.destroy_process_group()


class WorkerRanks:
    """The processes of all ranks except 0. Rank 0 starts and ends them.

    Raises:
        ConfigError: one of them could not start. Its output says why.
    """

    def __init__(self, config: EngineConfig, backend: str) -> None:
        size = config.static.tensor_parallel_size
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)  # type: ignore[attr-defined]
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, size):
                self._processes.append(_start(config, rank, store.port))
            for rank, process in enumerate(self._processes, 1):
                assert process.stdout is not None
                if process.stdout.readline() != READY:
                    process.kill()
                    raise ConfigError(f"rank {rank} of {size} could not start, exit status {process.wait()}")
            self.group = Group(0, size, backend, store)
        except BaseException:
            self._kill()
            raise

    def close(self, timeout: float = 10.0) -> None:
        """End the other ranks. Kill those that do not respond."""
        try:
            self.group.announce(Kind.STOP)
            for process in self._processes:
                process.wait(timeout)
        except (RuntimeError, subprocess.TimeoutExpired):
            pass  # a rank has ended already, or is in the middle of a step
        finally:
            self.group.close()
            self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def _start(config: EngineConfig, rank: int, port: int) -> "subprocess.Popen[bytes]":
    environ = dict(os.environ)
    config.static.prepare_environment(config.model.device, rank, environ, is_torch_imported=False)
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace_engine.runner.static.worker_rank", str(rank), str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environ,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:  # if the process has ended, reading its answer shows it
        process.stdin.write(msgpack.packb(config.to_wire()))
    return process
