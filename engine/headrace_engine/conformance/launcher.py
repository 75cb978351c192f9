"""Starts engines with the options of the suite."""

from dataclasses import dataclass
from typing import Any

from headrace_engine.api.llm_engine import config_of
from headrace_engine.conformance.driver import EngineUnderTest
from headrace_engine.options.config import EngineConfig
from headrace_engine.options.engine_args import EngineArgs

MAX_MODEL_LEN = 256
MAX_NUM_SEQS = 8


@dataclass(slots=True, kw_only=True)
class Launcher:
    """Starts engines.

    Args:
        options: options of `EngineArgs` that replace the suite's options.
    """

    options: dict[str, Any]
    patience: float = 120.0
    """Seconds without any output after which a case fails."""
    start_patience: float = 600.0
    end_patience: float = 30.0
    """Seconds within which processes end."""

    def config(self, **more: Any) -> EngineConfig:
        """Return the configuration of the plain engine with some options changed.

        Raises:
            ConfigError: the engine does not support an option or its value.
            ModelFetchError: the default model is needed and cannot be downloaded.
        """
        own = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": MAX_NUM_SEQS}
        return config_of(EngineArgs(**{**own, **self.options, **more}))

    def start(self, **more: Any) -> EngineUnderTest:
        """Start an engine and wait until it is ready.

        Raises:
            ConfigError, ModelLoadError, EngineDeadError, TimeoutError: the engine does not start.
        """
        return EngineUnderTest(
            self.config(**more),
            patience=self.patience,
            start_patience=self.start_patience,
            end_patience=self.end_patience,
        )
