"""The options of devices whose compilers need all shapes in advance. Imports no torch."""

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from headrace_engine.errors import ConfigError

STATIC_DEVICES = ("neuron", "xla", "static-cpu")
"""neuron: Trainium 2 and later by TorchNeuron. xla: Inferentia 2 and Trainium 1 by PyTorch/XLA. static-cpu: the same
step on the CPU without compilation, for debugging without a device."""

CACHE_VARIABLES = {"neuron": "TORCH_NEURONX_NEFF_CACHE_DIR", "xla": "NEURON_COMPILE_CACHE_URL"}
"""The environment variables for the graph folder of each compiler. They are read when torch is imported."""

_CORES = "NEURON_RT_VISIBLE_CORES"
_ALL_CORES = "HEADRACE_NEURON_CORES"

_BUCKETS = ("prefill_buckets", "decode_buckets", "context_buckets")


@dataclass(slots=True, kw_only=True)
class StaticConfig:
    """The shapes to compile: one graph for each bucket of tokens or requests and each context bucket."""

    prefill_buckets: list[int] | None = None
    """Prompt tokens in one step. None: 128, 512 and 2048, within the limits of a step and the model."""
    decode_buckets: list[int] | None = None
    """Requests in a decode step. None: the powers of 2 up to max_num_seqs."""
    context_buckets: list[int] | None = None
    """Tokens that attention reads. None: 512, 2048, 8192 and max_model_len."""
    tensor_parallel_size: int = 1
    """Number of NeuronCores that share the model, with one process each."""
    compile_cache_dir: str | None = None
    """Folder of compiled graphs, with a subfolder for each rank, so that later starts compile nothing. None: by the
    environment variables of the device."""

    @classmethod
    def problems(cls, options: Any, device: object) -> Iterator[str]:
        """Return the problems of these options for a device."""
        if device in STATIC_DEVICES:
            for name in ("batch_invariant", "trust_remote_code"):
                if getattr(options, name, False):
                    yield f"{name} is set, which device {device} cannot do"
            if options.attention_backend != "auto":
                yield f"attention_backend is {options.attention_backend!r}, but device {device} has its own attention"
        for field in fields(cls):
            name, value = field.name, getattr(options, field.name)
            if value == field.default:
                continue
            if device not in STATIC_DEVICES:
                yield f"{name} is set, but only the devices {', '.join(STATIC_DEVICES)} use it"
            elif name == "tensor_parallel_size":
                if not isinstance(value, int) or value < 1:
                    yield f"tensor_parallel_size is {value!r}, must be an integer of at least 1"
            elif name == "compile_cache_dir":
                if device not in CACHE_VARIABLES:
                    yield f"compile_cache_dir is set, but device {device} compiles nothing that could be kept"
                elif "://" in value:
                    yield f"compile_cache_dir is {value!r}, must be a folder"
            elif name in _BUCKETS and not _are_buckets(value):
                yield f"{name} is {value!r}, must be a list of integers of at least 1 in rising order"

    def prepare_environment(
        self, device: str, rank: int, environ: MutableMapping[str, str], *, is_torch_imported: bool
    ) -> None:
        """Set the environment: the core of this rank for the runtime, and the graph folder for the compiler.

        Raises:
            ConfigError: torch has been imported already, there are too few cores, or the folder is not writable.
        """
        wanted = {}
        if self.compile_cache_dir is not None:
            wanted[CACHE_VARIABLES[device]] = str(_made(Path(self.compile_cache_dir) / f"rank{rank}"))
        if self.tensor_parallel_size > 1 and device == "neuron":
            wanted[_CORES] = str(self._core(rank, environ.get(_ALL_CORES, environ.get(_CORES))))
            # the other ranks inherit this environment, which has the core of rank 0 already
            environ.setdefault(_ALL_CORES, environ.get(_CORES, ""))
        missing = {name: value for name, value in wanted.items() if environ.get(name) != value}
        if missing and is_torch_imported:
            assignments = " ".join(f"{name}={value}" for name, value in missing.items())
            raise ConfigError(
                f"torch was imported before the engine was made, too late for the device to be told: set {assignments} "
                "in the environment, or run the core in a process of its own"
            )
        environ.update(missing)

    def _core(self, rank: int, visible: str | None) -> int:
        """Return the core of a rank, among those that the operator allows for this process (default: all)."""
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
    """Return the folder. Raise an error if it is not writable, instead of compiling at each start."""
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
