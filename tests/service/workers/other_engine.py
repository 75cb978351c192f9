"""An engine of another package for real workers. It answers with the prompt and reports few statistics."""

from __future__ import annotations

import logging
import sys
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from headrace_engine.core import serving
from headrace_engine.core.runner_factory import load_tokenizer
from headrace_engine.options.config import EngineConfig
from unit.engine.fake_engine import CAPABILITIES, FakeCore, FakeEngine, make_core


class OtherEngine(FakeEngine):
    name = "other"
    child_module = "service.workers.other_engine"
    install_command = "pip install other-engine"


ENGINE = OtherEngine()


class OtherCore(FakeCore):
    capabilities = replace(CAPABILITIES, version="0.1")

    def call(self, method: str, *args: Any) -> Future[Any]:
        if method != "tokenizer":
            return super().call(method, *args)
        answer: Future[Any] = Future()
        answer.set_result(asdict(load_tokenizer(self._config)))
        return answer


def install(folder: Path) -> None:
    """Write the metadata of an installed package to `folder`, which must be on the import path."""
    metadata = folder / "other_engine-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-engine\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text(f"[headrace.engines]\nother = {__name__}:ENGINE\n")


def make_other_core(config: EngineConfig) -> FakeCore:
    make_core(config)
    logging.getLogger("other_engine.loader").warning("weights are of %s", "paper")
    return OtherCore(config)


if __name__ == "__main__":
    sys.exit(serving.run(make_other_core, int(sys.argv[1]), int(sys.argv[2])))
