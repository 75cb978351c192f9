"""Finds options that only models that generate have."""

from headrace_engine.options.config import EngineConfig


def generation_options(config: EngineConfig) -> list[str]:
    """Return one message for each such option that is set."""
    problems = []
    if config.lora is not None:
        problems.append("enable_lora is set, but models that embed or score take no adapters")
    if config.speculative is not None or config.speculative_options is not None:
        problems.append("speculative_config is set, but the model does not generate")
    return problems
