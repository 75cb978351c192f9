"""A rank other than 0: computes its part of every step that rank 0 broadcasts.

python -m headrace_engine.runner.static.worker_rank RANK PORT  < config
"""

import ctypes
import logging
import signal
import sys

import msgpack
import torch
import torch.distributed as dist

from headrace_engine.options.config import EngineConfig
from headrace_engine.runner.static.devices import create_compiler_backend
from headrace_engine.runner.static.group import READY, Group, Kind
from headrace_engine.runner.static.shard import ModelShard

_PR_SET_PDEATHSIG = 1


@torch.no_grad()
def follow(config: EngineConfig, rank: int, port: int) -> None:
    """Serve until rank 0 stops or its connection is closed."""
    compiler_backend = create_compiler_backend(config.model.device)
    compiler_backend.probe()
    assert compiler_backend.collectives is not None
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    group = Group(rank, config.static.tensor_parallel_size, compiler_backend.collectives, store)
    part = ModelShard(config, compiler_backend, group)
    while True:
        kind, first, second, inputs = group.receive()
        if kind is Kind.STOP:
            group.close()
            return
        if kind is Kind.ALLOCATE:
            part.allocate(first)
            part.compile(second)
        else:
            assert inputs is not None
            choice, _ = part.run(inputs, sealed=kind is Kind.STEP)
            compiler_backend.to_host(choice)  # so that an error is raised in the step that caused it


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only rank 0 decides when its ranks end
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    logging.basicConfig(level=logging.INFO)
    config = EngineConfig.from_wire(msgpack.unpackb(sys.stdin.buffer.read()))
    follow(config, int(sys.argv[1]), int(sys.argv[2]))


if __name__ == "__main__":
    main()
