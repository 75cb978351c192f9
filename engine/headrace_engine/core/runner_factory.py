"""Imports the runner and the tokenizer that the config names. So the core itself never imports torch."""

from importlib import import_module

from headrace_engine.errors import ConfigError
from headrace_engine.options.config import EngineConfig
from headrace_engine.runner.contracts import ModelRunner
from headrace_engine.text.tokenizer_parts import TokenizerParts


def create_runner(config: EngineConfig) -> ModelRunner:
    module, _, name = config.runner.partition(":")
    try:
        factory = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"runner {config.runner!r} cannot be imported ({error}); the default one needs the extra headrace[worker]"
        ) from error
    runner: ModelRunner = factory(config)
    return runner


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
