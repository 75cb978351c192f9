"""An engine for real workers that computes rows without a model, as far as a file allows.

`engine_args` has `rows`, a file with the number of rows that the engine may compute in all of a message, and `log`, to
which it appends a line for each input that it computes. A row is (sum of the ids, number of ids, index of the second
text, tokens of the prompt). An input with the id 13 has a row that is not finite. An input with the id 66 kills the
engine.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from headrace_engine.core import serving
from headrace_engine.core.outputs import EngineCoreOutputs, PooledRows, StepStats
from headrace_engine.core.runner_factory import load_tokenizer
from headrace_engine.options.capabilities import EngineCapabilities
from headrace_engine.options.config import EngineConfig
from headrace_engine.requests.pooling_request import PoolingCoreRequest
from headrace_engine.runner.contracts import PoolingInfo
from unit.engine.fake_engine import FakeCore, FakeEngine

INPUTS_OF_A_STEP = 4
WIDTH = 4
NOT_FINITE, KILLS = 13, 66
INFO = PoolingInfo(
    tasks=("embed", "score", "classify"),
    dimensions=WIDTH,
    max_input_tokens=64,
    labels=("sum", "length", "second", "prompt"),
    matryoshka_dimensions=(4, 2),
    prompts={"query": "the wheel "},
    pools_prompt=False,
)


class PoolingEngine(FakeEngine):
    name = "pooling"
    child_module = "service.workers.pooling_engine"


ENGINE = PoolingEngine()


def row_of(request: PoolingCoreRequest, index: int) -> bytes:
    """Return the row that the engine computes for an input."""
    ids = request.inputs[index]
    second = request.second_from[index] if request.second_from else 0
    width = 1 if request.task == "score" else request.dimensions or WIDTH
    return struct.pack("<4f", sum(ids), len(ids), second, request.num_prompt_tokens)[: 4 * width]


class PoolingCore(FakeCore):
    capabilities = EngineCapabilities(priority=True, stats=("running",))

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._limit, self._log = Path(config.engine_args["rows"]), Path(config.engine_args["log"])
        self.model_info = replace(self.model_info, vocab_size=384, pooling=INFO, weights=config.engine_args["weights"])
        self._messages: dict[str, tuple[PoolingCoreRequest, int]] = {}

    def add_request(self, message: Any) -> None:
        assert isinstance(message, PoolingCoreRequest)
        self._messages[message.request_id] = message, 0

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._messages.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._messages)

    def step(self) -> EngineCoreOutputs:
        rows = [self._compute(*state) for state in list(self._messages.values())]
        found = [each for each in rows if each is not None]
        if not found:
            time.sleep(0.01)
        stats = StepStats(running=len(self._messages), waiting=len(self._messages))
        return EngineCoreOutputs(outputs=[], stats=stats, rows=found)

    def _compute(self, message: PoolingCoreRequest, done: int) -> PooledRows | None:
        allowed = int(self._limit.read_text()) - message.first
        stop = min(len(message.inputs), done + INPUTS_OF_A_STEP, allowed)
        data = b""
        for index in range(done, stop):
            with self._log.open("a") as log:
                log.write(f"{message.request_id} {message.first + index}\n")
            if KILLS in message.inputs[index]:
                os._exit(9)
            if NOT_FINITE in message.inputs[index]:
                del self._messages[message.request_id]
                error = f"input[{message.first + index}] has no finite embedding"
                return PooledRows(message.request_id, message.first + done, 0, b"", True, error)
            data += row_of(message, index)
        if stop <= done:
            return None
        self._messages[message.request_id] = message, stop
        is_last = stop == len(message.inputs)
        if is_last:
            del self._messages[message.request_id]
        return PooledRows(message.request_id, message.first + done, stop - done, data, is_last)

    def call(self, method: str, *args: Any) -> Future[Any]:
        if method != "tokenizer":
            return super().call(method, *args)
        answer: Future[Any] = Future()
        answer.set_result(asdict(load_tokenizer(self._config)))
        return answer

    def check_integrity(self) -> None:
        assert not self._messages


def install(folder: Path) -> None:
    """Write the metadata of an installed package to `folder`, which must be on the import path."""
    metadata = folder / "pooling_engine-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: pooling-engine\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text(f"[headrace.engines]\npooling = {__name__}:ENGINE\n")


if __name__ == "__main__":
    sys.exit(serving.run(PoolingCore, int(sys.argv[1]), int(sys.argv[2])))
