"""`headrace worker` with an engine that sleeps. At its end it writes what publishing chunks cost.

The file `LOAD_PUBLISH_FILE` gets the processor time of all calls that write chunks to Redis: sending the call and
reading the reply.
"""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from headrace_broker.streams.writer import Attempt, StreamWrite, StreamWriter, WriteOutcome
from headrace_engine.options.config import EngineConfig
from headrace_workers.app import CELERY_OPTIONS, create_app
from headrace_workers.settings import WorkerSettings
from load.sleep_runner import RUNNER, TOKENIZER


class SleepingSettings(WorkerSettings):
    """The settings of a worker whose engine sleeps."""

    def engine_config(self) -> EngineConfig:
        config = super().engine_config()
        config.runner, config.tokenizer = RUNNER, TOKENIZER
        return config


class Meter:
    """Measures the calls of `StreamWriter.send` and `StreamWriter.receive`."""

    def __init__(self) -> None:
        self.cpu_seconds = 0.0
        self.entries = 0
        self.calls = 0
        self._send, self._receive = StreamWriter.send, StreamWriter.receive

    def send(self, writer: StreamWriter, writes: Sequence[StreamWrite], packed: bytes) -> None:
        started = time.thread_time()
        try:
            self._send(writer, writes, packed)
        finally:
            self.cpu_seconds += time.thread_time() - started

    def receive(
        self, writer: StreamWriter, writes: Sequence[StreamWrite], packed: bytes
    ) -> dict[Attempt, WriteOutcome]:
        started = time.thread_time()
        try:
            return self._receive(writer, writes, packed)
        finally:
            self.cpu_seconds += time.thread_time() - started
            self.entries += len(writes)
            self.calls += 1


def main() -> None:
    meter = Meter()
    StreamWriter.send = lambda *args: meter.send(*args)  # type: ignore[method-assign]
    StreamWriter.receive = lambda *args: meter.receive(*args)  # type: ignore[method-assign]
    app = create_app(SleepingSettings.from_env())
    try:
        app.worker_main(["worker", *CELERY_OPTIONS, "--hostname", f"load-{os.getpid()}@test", "--loglevel", "WARNING"])
    finally:
        account = {"cpu_seconds": meter.cpu_seconds, "entries": meter.entries, "calls": meter.calls}
        Path(os.environ["LOAD_PUBLISH_FILE"]).write_text(json.dumps(account))


if __name__ == "__main__":
    main()
