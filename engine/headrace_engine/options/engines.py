"""`Engine`: what the parent knows about an engine before its child process runs, and the lookup by name."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Final, Protocol

from headrace_engine.errors import ConfigError
from headrace_engine.options.config import KV_CACHE_DEVICES, OWN_ENGINE, EngineConfig
from headrace_engine.options.engine_options import EngineOptions
from headrace_engine.options.speculative_config import SpeculativeConfig
from headrace_engine.options.static_config import StaticConfig
from headrace_engine.plain_values import shown
from headrace_wire.option import options_of


class OwnEngine:
    """The engine of this package."""

    name = OWN_ENGINE
    child_module = "headrace_engine.core.child"
    install_command = "pip install 'headrace[worker]'"
    stall_seconds = None

    def problems(self, args: EngineOptions) -> list[str]:
        return [*_wrong_choices(args), *_wrong_devices(args), *_contradictions(args)]

    def environment(self, _: EngineConfig) -> dict[str, str]:
        return {}


ENGINE = OwnEngine()


def _wrong_choices(args: EngineOptions) -> Iterator[str]:
    for found in options_of(EngineOptions):
        value = getattr(args, found.name)
        if found.choices and value not in found.choices:
            problem = f"{found.name} must be one of {', '.join(map(str, found.choices))}, got {shown(value)}"
            if found.name == "dtype" and str(value).removeprefix("torch.") in ("half", "float16"):
                problem += "; bfloat16 has the size of float16"
            yield problem


def _wrong_devices(args: EngineOptions) -> Iterator[str]:
    for found in options_of(EngineOptions):
        value = getattr(args, found.name)
        if found.devices and args.device not in found.devices and value != found.default:
            yield f"{found.name} {found.elsewhere.format(value=value, device=args.device)}"
    for kept, devices in KV_CACHE_DEVICES.items():
        if args.kv_cache_dtype == kept and args.device not in devices:
            yield f"device must be one of {', '.join(devices)} with kv_cache_dtype {kept}, got {args.device}"


def _contradictions(args: EngineOptions) -> Iterator[str]:
    if args.engine_args:
        yield f"engine_args must be empty with engine {OWN_ENGINE}, got {', '.join(args.engine_args)}"
    if args.batch_invariant and args.attention_backend not in ("auto", "native"):
        yield f"attention_backend must be auto or native with batch_invariant, got {args.attention_backend}"
    if args.async_scheduling and args.speculative_config is not None:
        yield "async_scheduling and speculative_config exclude each other: drafts follow known tokens"
    if args.batch_invariant and args.enable_lora:
        yield "batch_invariant and enable_lora exclude each other: adapters' products have no fixed shape"
    if args.speculative_config is not None:
        yield from SpeculativeConfig.problems(args.speculative_config)
    yield from StaticConfig.problems(args)


ENTRY_POINT_GROUP: Final = "headrace.engines"


class Engine(Protocol):
    """An engine as the parent sees it. Its module must be quick to import: only the child imports large packages."""

    @property
    def name(self) -> str: ...

    @property
    def child_module(self) -> str:
        """The module to run as `python -m child_module READ_FD WRITE_FD`. It calls `core.serving.run`.

        The module imports optional packages only when `run` creates the core, so that `run` can report missing ones.
        """

    @property
    def install_command(self) -> str:
        """The command that installs the child's packages. The message about missing packages shows it."""

    @property
    def stall_seconds(self) -> float | None:
        """How long a step may take before the worker kills the child. None: the default of the worker."""

    def problems(self, args: EngineOptions) -> list[str]:
        """Return one message for each option that the engine does not support, or whose value it refuses.

        Types and lower bounds have been checked before, with an exception: the values of dtype, device,
        attention_backend, kv_cache_dtype and quantization depend on the engine. They are known to be text for other
        engines, and are unchecked for Headrace's own engine.
        """

    def environment(self, config: EngineConfig) -> dict[str, str]:
        """Return additional environment variables for the child."""


def find_engine(name: str) -> Engine:
    """Import and return the engine with this name, and no other engine.

    Raises:
        ConfigError: no installed package provides it, or its package cannot be imported.
    """
    if name == OWN_ENGINE:  # not by the package's metadata, which may be older than its code
        return ENGINE
    offered = entry_points(group=ENTRY_POINT_GROUP)
    values = sorted({entry.value for entry in offered if entry.name == name})
    if not values:
        names = ", ".join(sorted({OWN_ENGINE, *offered.names}))
        raise ConfigError(
            f"engine must be one of {names}, got {name!r}; install the package that has it, or install Headrace again "
            "if its installation is older than the engine"
        )
    if len(values) > 1:
        raise ConfigError(f"engine {name!r} is offered by several packages: {', '.join(values)}; remove all but one")
    try:
        found: Engine = EntryPoint(name, values[0], ENTRY_POINT_GROUP).load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"engine {name!r} cannot be imported from {values[0]}: {error}") from error
    return found
