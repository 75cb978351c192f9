"""Options of devices whose compiler must know every shape beforehand. Imports no torch."""

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from headrace_engine.errors import ConfigError

STATIC_DEVICES = ("neuron", "xla", "static-cpu")
"""neuron: Trainium 2 and later by TorchNeuron. xla: Inferentia 2 and Trainium 1 by PyTorch/XLA. static-cpu: the same
step on the CPU, uncompiled, to look for a fault without a device."""

CACHE_VARIABLES = {"neuron": "TORCH_NEURONX_NEFF_CACHE_DIR", "xla": "NEURON_COMPILE_CACHE_URL"}
"""What tells each device's compiler where to keep its graphs; read when torch is imported."""

_CORES = "NEURON_RT_VISIBLE_CORES"
_ALL_CORES = "HEADRACE_NEURON_CORES"

_BUCKETS = ("prefill_buckets", "decode_buckets", "context_buckets")


@dataclass(slots=True, kw_only=True)
class StaticConfig:
    """What is compiled, one graph for each bucket of tokens or requests and each context bucket."""

    prefill_buckets: list[int] | None = None
    """Tokens of a prompt computed in one step; None takes 128, 512 and 2048 as far as a step and the model go."""
    decode_buckets: list[int] | None = None
    """Requests that get a token in one step; None takes the powers of 2 up to max_num_seqs."""
    context_buckets: list[int] | None = None
    """Tokens that attention reads; None takes 512, 2048, 8192 and max_model_len."""
    tensor_parallel_size: int = 1
    """NeuronCores that share the model, each with a process of its own."""
    compile_cache_dir: str | None = None
    """Folder of compiled graphs, one subfolder a rank, so that a second start compiles nothing. None leaves it to the
    device's own environment variables."""

    @classmethod
    def problems(cls, options: Any, device: object) -> Iterator[str]:
        """What is wrong with the fields of this class in `options`, given the device."""
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
        """Tell the device's runtime which core is this rank's, and its compiler where the rank's graphs are kept.

        Raises:
            ConfigError: it would not hear of it any more, has too few cores, or cannot write there.
        """
        wanted = {}
        if self.compile_cache_dir is not None:
            wanted[CACHE_VARIABLES[device]] = str(_made(Path(self.compile_cache_dir) / f"rank{rank}"))
        if self.tensor_parallel_size > 1 and device == "neuron":
            wanted[_CORES] = str(self._core(rank, environ.get(_ALL_CORES, environ.get(_CORES))))
            # the other ranks inherit this environment, in which the first has named its own core already
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
        """The rank's core among those that the operator left to this process, all where none are named."""
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
    """The folder; it is told now if nothing can be kept in it, and not by a compilation at each start."""
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
