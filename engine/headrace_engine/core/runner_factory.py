"""Imports the runner and the tokenizer that the config names. So the core itself never imports torch."""

from importlib import import_module
from typing import Any, Final

from headrace_engine.errors import ConfigError
from headrace_engine.options.config import EngineConfig
from headrace_engine.runner.contracts import ModelRunner, PoolingRunner
from headrace_engine.text.tokenizer_parts import TokenizerParts

_POOLING_RUNNER: Final = "headrace_engine.runner.loader:create_pooling_runner"


def create_runner(config: EngineConfig) -> ModelRunner:
    runner: ModelRunner = _create(config.runner, config)
    return runner


def create_pooling_runner(config: EngineConfig) -> PoolingRunner:
    """Create the runner of a model that computes one row of numbers for each input."""
    runner: PoolingRunner = _create(_POOLING_RUNNER, config)
    return runner


def _create(path: str, config: EngineConfig) -> Any:
    module, _, name = path.partition(":")
    try:
        factory = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"runner {path!r} cannot be imported ({error}); the default one needs the extra headrace[worker]"
        ) from error
    return factory(config)


def load_tokenizer(config: EngineConfig) -> TokenizerParts:
    """Load the tokenizer of the model by the function that the config names.

    Raises:
        ConfigError: there is no such function.
        ModelLoadError: the model has no usable tokenizer.
    """
    module, _, name = config.tokenizer.partition(":")
    try:
        load = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"tokenizer {config.tokenizer!r} cannot be imported ({error})") from error
    parts: TokenizerParts = load(config)
    return parts
