"""`Engine`: what the parent knows of an engine before its child process runs, and how one is found by its name."""

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Final, Protocol

from headrace_engine.config import EngineConfig
from headrace_engine.engine_names import OWN_ENGINE
from headrace_engine.engine_options import EngineOptions
from headrace_engine.errors import ConfigError

ENTRY_POINT_GROUP: Final = "headrace.engines"


class Engine(Protocol):
    """An engine as the parent sees it. Importing its module imports nothing heavy; the child does."""

    @property
    def name(self) -> str: ...

    @property
    def child_module(self) -> str:
        """Run as `python -m child_module READ_FD WRITE_FD`; calls `core.serving.run`.

        Imports what may not be installed only when `run` asks for the core: `run` tells the parent what is missing.
        """

    @property
    def install_command(self) -> str:
        """Installs what the child imports, for the sentence that says that it is missing."""

    @property
    def stall_seconds(self) -> float | None:
        """How long a step may take before the worker kills the child; None is the worker's default."""

    def problems(self, args: EngineOptions) -> list[str]:
        """Options that the engine does not have, or that are wrong for it, one sentence each.

        Types and lower bounds are checked already, but for dtype, device, attention_backend, kv_cache_dtype and
        quantization: their values are the engine's own. They are text here, except for our own engine.
        """

    def environment(self, config: EngineConfig) -> dict[str, str]:
        """Variables that the child has in addition to the parent's."""


def find_engine(name: str) -> Engine:
    """The engine of this name. No other engine is imported.

    Raises:
        ConfigError: no installed package offers it, or its package cannot be imported.
    """
    if name == OWN_ENGINE:  # needs no metadata, which may be older than the checkout
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
