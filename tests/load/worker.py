"""`headrace worker` with an engine that sleeps. At its end it writes what publishing chunks cost.

The file `LOAD_PUBLISH_FILE` gets the processor time of all calls that write chunks to Redis: packing the call, sending
it and reading the reply.
"""

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

from headrace_broker.streams.writer import Attempt, StreamWrite, StreamWriter, WriteOutcome
from headrace_engine.options.config import EngineConfig
from headrace_workers.app import create_app
from headrace_workers.settings import WorkerSettings
from load.sleep_runner import IMPORT_PATH


class SleepingSettings(WorkerSettings):
    """The settings of a worker whose engine sleeps."""

    def engine_config(self) -> EngineConfig:
        config = super().engine_config()
        config.runner = IMPORT_PATH
        return config


class Meter:
    """Measures the calls of `StreamWriter.publish`."""

    def __init__(self) -> None:
        self.cpu_seconds = 0.0
        self.entries = 0
        self.calls = 0
        self._publish = StreamWriter.publish

    def publish(
        self, writer: StreamWriter, writes: Iterable[StreamWrite], packed: bytes | None = None
    ) -> dict[Attempt, WriteOutcome]:
        batch = list(writes)
        started = time.thread_time()
        try:
            return self._publish(writer, batch, packed)
        finally:
            self.cpu_seconds += time.thread_time() - started
            self.entries += len(batch)
            self.calls += 1


def main() -> None:
    meter = Meter()
    StreamWriter.publish = lambda *args: meter.publish(*args)  # type: ignore[method-assign]
    app = create_app(SleepingSettings.from_env())
    try:
        options = ["--without-gossip", "--without-mingle", "--hostname", f"load-{os.getpid()}@test"]
        app.worker_main(["worker", *options, "--loglevel", "WARNING"])
    finally:
        account = {"cpu_seconds": meter.cpu_seconds, "entries": meter.entries, "calls": meter.calls}
        Path(os.environ["LOAD_PUBLISH_FILE"]).write_text(json.dumps(account))


if __name__ == "__main__":
    main()
