"""An engine of somebody else, and its child: `python -m unit.engine.fake_engine READ_FD WRITE_FD`.

It answers each request with its prompt, one token a step. What it does at its start is in `engine_args`. Its child
runs where nothing is installed.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints
from typing import TYPE_CHECKING, Any

from headrace_engine.core import serving
from headrace_engine.core.outputs import EngineCoreOutput, EngineCoreOutputs, StepStats
from headrace_engine.errors import ConfigError, HeadraceEngineError, ModelLoadError
from headrace_engine.options import engines
from headrace_engine.options.capabilities import EngineCapabilities
from headrace_engine.options.config import EngineConfig
from headrace_engine.options.engine_args import EngineArgs
from headrace_engine.requests.request import EngineCoreRequest, FinishReason
from headrace_engine.runner.contracts import ModelInfo
from headrace_engine.system.load_progress import RECORD_FIELD

if TYPE_CHECKING:
    import pytest

CAPABILITIES = EngineCapabilities(
    draws="fake-1",
    exact_resume="greedy",
    max_logit_bias=7,
    temperature_range=(0.01, 2.0),
    structured_outputs=("json", "regex"),
    min_tokens=True,
    stats=("running", "waiting"),
)


class FakeEngine:
    name = "fake"
    child_module = "unit.engine.fake_engine"
    install_command = "pip install fake-engine"
    stall_seconds = 300.0

    def problems(self, args: EngineArgs) -> list[str]:
        return [] if args.quantization in (None, "fp8") else [f"quantization is {args.quantization}, allowed is fp8"]

    def environment(self, config: EngineConfig) -> dict[str, str]:
        return {"FAKE_ENGINE_MODEL": config.model.model}


ENGINE = FakeEngine()


def offer(monkeypatch: pytest.MonkeyPatch, *values: str) -> None:
    """Let packages be installed that offer these values as engine `fake`."""
    offered = EntryPoints(EntryPoint("fake", value, engines.ENTRY_POINT_GROUP) for value in values)
    monkeypatch.setattr(engines, "entry_points", lambda group: offered.select(group=group))


class FakeCore:
    capabilities = CAPABILITIES
    wake: Callable[[], None]

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._requests: dict[str, list[int]] = {}
        self.model_info = ModelInfo(
            vocab_size=100,
            max_model_len=50,
            eos_token_ids=[],
            architecture="Fake",
            dtype=config.model.dtype,
            device="fake",
            attention="fake",
            num_parameters=0,
        )

    def add_request(self, message: EngineCoreRequest) -> None:
        self._requests[message.request_id] = list(message.prompt_token_ids)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._requests)

    def step(self) -> EngineCoreOutputs:
        outputs = [EngineCoreOutput(name, [tokens.pop(0)]) for name, tokens in self._requests.items()]
        for output in outputs:
            if not self._requests[output.request_id]:
                del self._requests[output.request_id]
                output.finish_reason = FinishReason.LENGTH
        return EngineCoreOutputs(outputs=outputs, stats=StepStats(running=len(self._requests)))

    def call(self, method: str, *args: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        if method == "tokenizer":
            from unit.engine.letters import load_tokenizer

            answer.set_result(asdict(load_tokenizer(None)))
        elif method == "config":
            answer.set_result(self._config.to_wire())
        elif method == "variable":
            answer.set_result(os.environ.get(args[0]))
        elif method == "imported":
            answer.set_result({name: sys.modules[name].__file__ for name in args if name in sys.modules})
        elif method == "start_rank":
            answer.set_result(subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, close_fds=False).pid)
        elif method == "fork_rank":
            pid = os.fork()
            if not pid:
                while True:
                    signal.pause()
            answer.set_result(pid)
        else:
            os._exit(int(args[0]))
        return answer

    def check_integrity(self) -> None:
        assert not self._requests

    def shutdown(self) -> None:
        pass


def make_core(config: EngineConfig) -> FakeCore:
    """Map errors of the start as an engine does whose own ones are others."""
    wanted = config.engine_args.get("fails_with")
    if wanted == "no part":
        import_module("a_package_that_nobody_has")
    errors: dict[str, HeadraceEngineError] = {
        "ValueError": ConfigError("gpu_share is 2, must be at most 1"),
        "OSError": ModelLoadError("there is no config.json"),
    }
    if wanted in errors:
        raise errors[wanted]
    if wanted is not None:
        raise RuntimeError(wanted)
    if config.engine_args.get("loads_slowly"):
        logging.getLogger(__name__).info("half of it", extra={RECORD_FIELD: 0.5})
    if config.engine_args.get("is_older"):
        serving.PROTOCOL -= 1  # type: ignore[misc]
    return FakeCore(config)


if __name__ == "__main__":
    sys.exit(serving.run(make_core, int(sys.argv[1]), int(sys.argv[2])))
