"""The options of devices whose compilers need all shapes in advance. Imports no torch."""

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final

from headrace_engine.errors import ConfigError
from headrace_engine.options.devices import DEVICES, STATIC_DEVICES
from headrace_wire.option import option

_CORES = "NEURON_RT_VISIBLE_CORES"
_ALL_CORES = "HEADRACE_NEURON_CORES"
_USED_BY_STATIC: Final = f"is set, but only the devices {', '.join(STATIC_DEVICES)} use it"


@dataclass(kw_only=True)
class StaticOptions:
    """The shapes to compile. Each combination of a prefill or decode bucket with a context bucket gets a graph."""

    prefill_buckets: list[int] | None = option(
        None,
        "Numbers of prompt tokens in one step for which devices with static shapes compile graphs. None: 128, 512 and "
        "2048, within the limits of a step and the model.",
        metavar="N,N",
        devices=STATIC_DEVICES,
        elsewhere=_USED_BY_STATIC,
    )
    decode_buckets: list[int] | None = option(
        None,
        "Numbers of requests in a decode step for which devices with static shapes compile graphs. None: the powers of "
        "2 up to max_num_seqs.",
        metavar="N,N",
        devices=STATIC_DEVICES,
        elsewhere=_USED_BY_STATIC,
    )
    context_buckets: list[int] | None = option(
        None,
        "Numbers of tokens in a context for which devices with static shapes compile graphs. None: 512, 2048, 8192 and "
        "max_model_len.",
        metavar="N,N",
        devices=STATIC_DEVICES,
        elsewhere=_USED_BY_STATIC,
    )
    tensor_parallel_size: int = option(
        1,
        "Number of devices that share the model, with one process each: NeuronCores, or those of engine vllm.",
        metavar="N",
        least=1,
        devices=STATIC_DEVICES,
        elsewhere=_USED_BY_STATIC,
    )
    compile_cache_dir: str | None = option(
        None,
        "Folder of compiled graphs, with a subfolder for each rank, so that later starts compile nothing. None: the "
        "folder that the device's environment variables set.",
        metavar="FOLDER",
        devices=tuple(device.name for device in DEVICES.values() if device.graph_cache_variable is not None),
        elsewhere="is set, but device {device} compiles nothing that could be kept",
    )


@dataclass(kw_only=True)
class StaticConfig(StaticOptions):
    """The shapes to compile, and the environment of a rank."""

    @classmethod
    def problems(cls, options: StaticOptions) -> Iterator[str]:
        """Return the problems of these options that do not depend on the device."""
        for name in ("prefill_buckets", "decode_buckets", "context_buckets"):
            value: Any = getattr(options, name)
            if value is not None and not _are_buckets(value):
                yield f"{name} must be a list of integers of at least 1 in rising order, got {value!r}"
        if options.compile_cache_dir is not None and "://" in options.compile_cache_dir:
            yield f"compile_cache_dir must be a folder, got {options.compile_cache_dir!r}"

    def prepare_environment(
        self, device: str, rank: int, environ: MutableMapping[str, str], *, is_torch_imported: bool
    ) -> None:
        """Set the environment: the core of this rank for the runtime, and the graph folder for the compiler.

        Raises:
            ConfigError: torch has been imported already, there are too few cores, or the folder is not writable.
        """
        wanted = {}
        if self.compile_cache_dir is not None:
            variable = DEVICES[device].graph_cache_variable
            assert variable is not None
            wanted[variable] = str(_made(Path(self.compile_cache_dir) / f"rank{rank}"))
        if self.tensor_parallel_size > 1 and DEVICES[device].has_core_per_rank:
            wanted[_CORES] = str(self._core(rank, environ.get(_ALL_CORES, environ.get(_CORES))))
            # the other ranks inherit this environment, in which _CORES names only the core of rank 0
            environ.setdefault(_ALL_CORES, environ.get(_CORES, ""))
        missing = {name: value for name, value in wanted.items() if environ.get(name) != value}
        if missing and is_torch_imported:
            assignments = " ".join(f"{name}={value}" for name, value in missing.items())
            raise ConfigError(
                f"torch was imported before the engine was created, so its device cannot be configured: set "
                f"{assignments} in the environment, or run the core in a process of its own"
            )
        environ.update(missing)

    def _core(self, rank: int, visible: str | None) -> int:
        """Return the core of a rank. `visible` lists the cores that this process may use; none means all cores."""
        if not visible:
            return rank
        cores: list[int] = []
        for part in visible.split(","):
            first, _, last = part.partition("-")
            try:
                cores += range(int(first), int(last or first) + 1)
            except ValueError:
                raise ConfigError(f"{_CORES}={visible} names no cores, must be as 0-3 or 0,2") from None
        if len(cores) < self.tensor_parallel_size:
            raise ConfigError(
                f"tensor_parallel_size is {self.tensor_parallel_size}, but {_CORES}={visible} names {len(cores)} cores"
            )
        return cores[rank]


def _made(folder: Path) -> Path:
    """Create and return the folder. Raise an error if it is not writable: otherwise each start would compile."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"compile_cache_dir is {str(folder.parent)!r}, which cannot be written: {error}") from error
    return folder


def _are_buckets(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(bucket, int) and bucket >= 1 for bucket in value)
        and value == sorted(set(value))
    )
