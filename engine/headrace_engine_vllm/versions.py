"""Which versions of vLLM this package was made for. Its inner interfaces change without notice."""

import re
from collections.abc import Mapping
from typing import Final

from headrace_engine.errors import ConfigError

OLDEST: Final = (0, 29)
NEWEST: Final = (0, 33)
ANY_VERSION: Final = "HEADRACE_ENGINE_ANY_VERSION"
FIRST_WITH_LORA_ON_CPU: Final = (0, 33)
"""Older ones give requests without an adapter the weights of one: index -1 gathers the last adapter's."""


def minor_version(version: str) -> tuple[int, int] | None:
    """The first two numbers of a version such as `0.32.0+cpu`; None where it has none, as a build from source may."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def check_version(version: str, environ: Mapping[str, str]) -> None:
    """Raises ConfigError for a version that this package was not made for, unless the environment allows any."""
    found = minor_version(version)
    if environ.get(ANY_VERSION) == "1" or (found is not None and OLDEST <= found <= NEWEST):
        return
    supported = f">={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"
    raise ConfigError(
        f"vLLM is {version}, supported are {supported}: install one of these, or set {ANY_VERSION}=1 to try this one"
    )


def draws_name(version: str, runner: int, platform: str) -> str:
    """The name of the draws: a seed's draws belong to one version, model runner and kind of device."""
    found = minor_version(version)
    number = f"{found[0]}.{found[1]}" if found is not None else version
    return f"vllm-{number}-v{runner}-{platform}"
