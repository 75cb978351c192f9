"""`Engine`: what the parent knows about an engine before its child process runs, and the lookup by name."""

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Final, Protocol

from headrace_engine.config import EngineConfig
from headrace_engine.engine_names import OWN_ENGINE
from headrace_engine.engine_options import EngineOptions
from headrace_engine.errors import ConfigError

ENTRY_POINT_GROUP: Final = "headrace.engines"


class Engine(Protocol):
    """An engine as the parent sees it. Its module imports nothing heavy: only the child does."""

    @property
    def name(self) -> str: ...

    @property
    def child_module(self) -> str:
        """The module to run as `python -m child_module READ_FD WRITE_FD`. It calls `core.serving.run`.

        It imports optional packages only when `run` creates the core, so that `run` reports missing ones.
        """

    @property
    def install_command(self) -> str:
        """The command that installs the packages of the child, for the message that they are missing."""

    @property
    def stall_seconds(self) -> float | None:
        """How long a step may take before the worker kills the child. None: the default of the worker."""

    def problems(self, args: EngineOptions) -> list[str]:
        """Return one message for each option that the engine does not support, or whose value it refuses.

        Types and lower bounds have been checked, except for dtype, device, attention_backend, kv_cache_dtype and
        quantization, whose values depend on the engine. They are text, except for Headrace's own engine.
        """

    def environment(self, config: EngineConfig) -> dict[str, str]:
        """Return additional environment variables for the child."""


def find_engine(name: str) -> Engine:
    """Import and return the engine with this name, and no other engine.

    Raises:
        ConfigError: no installed package provides it, or its package cannot be imported.
    """
    if name == OWN_ENGINE:  # not by metadata, which may be older than the checkout
        own: Engine = import_module("headrace_engine.own_engine").ENGINE
        return own
    offered = entry_points(group=ENTRY_POINT_GROUP)
    values = sorted({entry.value for entry in offered if entry.name == name})
    if not values:
        names = ", ".join(sorted({OWN_ENGINE, *offered.names}))
        raise ConfigError(
            f"engine is {name!r}, installed are {names}; install the package that has it, or install Headrace again "
            "where its installation is older than the engine"
        )
    if len(values) > 1:
        raise ConfigError(f"engine is {name!r}, which several packages offer: {', '.join(values)}; remove all but one")
    try:
        found: Engine = EntryPoint(name, values[0], ENTRY_POINT_GROUP).load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"engine {name!r} is {values[0]}, which cannot be imported: {error}") from error
    return found
