"""The versions of vLLM that this package supports. vLLM's internal interfaces change without notice."""

import re
from collections.abc import Mapping
from typing import Final

from headrace_engine.errors import ConfigError

OLDEST: Final = (0, 29)
NEWEST: Final = (0, 33)
ANY_VERSION: Final = "HEADRACE_ENGINE_ANY_VERSION"
FIRST_WITH_LORA_ON_CPU: Final = (0, 33)
"""Older versions apply an adapter to requests without one: index -1 selects the last adapter."""


def minor_version(version: str) -> tuple[int, int] | None:
    """Return the first two numbers of a version such as `0.32.0+cpu`. None: it has none, like some source builds."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def check_version(version: str, environ: Mapping[str, str]) -> None:
    """Raise ConfigError for a version that is not supported, unless the environment allows any."""
    found = minor_version(version)
    if environ.get(ANY_VERSION) == "1" or (found is not None and OLDEST <= found <= NEWEST):
        return
    supported = f">={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
    raise ConfigError(
        f"vLLM must be {supported}, got {version}: install a supported one, or set {ANY_VERSION}=1 to try this one"
    )


def draws_name(version: str, runner: int, platform: str) -> str:
    """Return a name for the random draws. They depend on the version, the model runner and the kind of device."""
    found = minor_version(version)
    number = f"{found[0]}.{found[1]}" if found is not None else version
    return f"vllm-{number}-v{runner}-{platform}"
