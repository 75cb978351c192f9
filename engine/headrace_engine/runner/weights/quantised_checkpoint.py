"""Finds the reader for a quantised checkpoint, and the quantised modules in its files."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

from safetensors import safe_open

from headrace_engine.errors import ModelLoadError
from headrace_engine.runner.weights.awq import AWQReader
from headrace_engine.runner.weights.compressed_tensors import CompressedTensorsReader
from headrace_engine.runner.weights.float_weight import FloatWeight
from headrace_engine.runner.weights.fp8 import FP8Reader
from headrace_engine.runner.weights.gptq import GPTQReader
from headrace_engine.runner.weights.integer_weight import IntegerWeight
from headrace_engine.runner.weights.module_tensors import ModuleTensors


class WeightReader(Protocol):
    """Reads the weights of one kind of checkpoint."""

    @property
    def marks(self) -> tuple[str, ...]:
        """The tensors that only a quantised module has, one of them."""

    @property
    def bits(self) -> int:
        """Of each weight; the fewest if they differ."""

    def read(self, tensors: ModuleTensors, out: int, inputs: int) -> IntegerWeight | FloatWeight:
        """Read the weight of a linear layer. Raises ModelLoadError that names the tensor."""


_READERS: dict[str, Callable[[Mapping[str, Any]], WeightReader]] = {
    "awq": AWQReader,
    "fp8": FP8Reader,
    "gptq": GPTQReader,
    "compressed-tensors": CompressedTensorsReader,
}


def reader_for(model: str, config: Mapping[str, Any]) -> WeightReader:
    """Return the reader for a checkpoint with this `quantization_config`. Raises ModelLoadError if there is none."""
    by_flags = "bitsandbytes" if config.get("load_in_4bit") or config.get("load_in_8bit") else "an unnamed method"
    method = str(config.get("quant_method", by_flags))
    if method not in _READERS:
        raise ModelLoadError(
            f"model {model!r} is quantised with {method}, which is not supported; served are "
            f"{', '.join(_READERS)}, GGUF files, and weights that are not quantised: take one, or --engine vllm"
        )
    try:
        return _READERS[method](config)
    except ModelLoadError as error:
        raise ModelLoadError(f"model {model!r}: {error}") from error


@contextmanager
def quantised_modules(files: Sequence[str], marks: Sequence[str]) -> Iterator[list[ModuleTensors]]:
    """Map safetensors files, and yield the modules that have one of the tensors `marks`, in the order of their names.

    Raises:
        SafetensorError: a file is truncated or is none of safetensors.
    """
    with ExitStack() as opened:
        found: dict[str, dict[str, Any]] = {}
        for path in files:
            file = opened.enter_context(safe_open(path, framework="pt"))
            for name in file.keys():  # noqa: SIM118  # no mapping
                module, _, last = name.rpartition(".")
                found.setdefault(module, {})[last] = partial(file.get_tensor, name)
        yield [
            ModuleTensors(module, found[module])
            for module in sorted(found)
            if not found[module].keys().isdisjoint(marks)
        ]
