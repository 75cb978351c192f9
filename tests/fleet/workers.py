"""Workers whose engine sleeps, and what Redis spends on them."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis

from chaos.model import save_chaos_model
from headrace_broker.server.embedded import EmbeddedServer
from service.workers.service import Service

SLOTS = 64
_STARTED_AT_ONCE = 4
STEP_TOKENS = 2048
"""Most tokens that a step of the engine computes."""


@contextmanager
def sleeping_service(step_seconds: float) -> Iterator["SleepingService"]:
    """Yield a server without workers. A step of its workers' engines sleeps for `step_seconds`."""
    with tempfile.TemporaryDirectory() as temporary, EmbeddedServer(environ={}, password=False) as server:
        service = SleepingService(server, save_chaos_model(Path(temporary) / "tiny"), Path(temporary))
        service.environ = {
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "LOAD_STEP_SECONDS": str(step_seconds),
            "LOAD_PUBLISH_FILE": str(Path(temporary) / "published.json"),
        }
        try:
            yield service
        finally:
            service.close()


class SleepingService(Service):
    environ: dict[str, str]

    def start_workers(self, count: int, *, slots: int = SLOTS, **settings: object) -> None:
        """Start so many workers with these settings, and wait until they are ready.

        Four start at a time: a start takes seconds of a processor, and each must be ready in time.
        """
        command = [sys.executable, "-m", "load.worker"]
        settings = {"max_num_seqs": slots, "max_num_batched_tokens": STEP_TOKENS, **settings}
        for first in range(0, count, _STARTED_AT_ONCE):
            started = [
                self.start_worker(command=command, environ=self.environ, **settings)
                for _ in range(min(_STARTED_AT_ONCE, count - first))
            ]
            for worker in started:
                worker.wait_ready()


def cpu_seconds(client: "redis.Redis") -> float:
    """Return the processor time of the server so far."""
    info = client.info("cpu")
    return float(info["used_cpu_user"] + info["used_cpu_sys"])


def worker_cpu_seconds(service: Service) -> float:
    """Return the processor time of all living processes of the workers so far."""
    return sum(_process_seconds(pid) for worker in service.workers for pid in worker.processes())


def _process_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Spent:
    """What Redis has done so far, or between two moments."""

    cpu_seconds: float
    commands: int
    scripts: int

    @classmethod
    def read(cls, client: "redis.Redis") -> "Spent":
        calls = {name: figures["calls"] for name, figures in client.info("commandstats").items()}
        return cls(
            cpu_seconds(client),
            sum(calls.values()),
            sum(calls.get(f"cmdstat_{name}", 0) for name in ("eval", "evalsha")),
        )

    def __sub__(self, other: "Spent") -> "Spent":
        return Spent(self.cpu_seconds - other.cpu_seconds, self.commands - other.commands, self.scripts - other.scripts)
