"""Memory: what is free, what the weights of a model need, and the release of what is not needed."""

import contextlib
import ctypes
import functools
import json
import math
import os
from collections.abc import Container
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from headrace_engine.checkpoints.checkpoint import is_gguf
from headrace_engine.errors import ConfigError
from headrace_engine.system import control_group
from headrace_engine.system.heap import release_freed_heap

_PAGE = os.sysconf("SC_PAGE_SIZE")
_MADV_DONTNEED = 4
_ITEM_SIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_FLOATS = {"F64", "F32", "F16", "BF16"}
_PACKED_INTEGERS = ("qweight", "weight_packed", "weight")
"""The tensors with the integers of a weight, by the last part of their names. Words are of type I32."""


def available_memory() -> int:
    """Return the bytes that are available without swapping, within the limits of the control groups."""
    free = os.sysconf("SC_AVPHYS_PAGES") * _PAGE
    with contextlib.suppress(OSError, ValueError, StopIteration), Path("/proc/meminfo").open() as lines:
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    room = control_group.memory_room()
    return free if room is None else min(free, room)


def weight_bytes(
    folder: Path, dtype: torch.dtype, dequantised_bits: int | None = None, *, widens_float8: bool = True
) -> int:
    """Return the bytes of all tensors in safetensors files after loading in `dtype`. Reads only the headers.

    Args:
        dequantised_bits: of each weight of a checkpoint whose integers are dequantised. None: they stay packed.
        widens_float8: whether weights in FP8 become `dtype`.
    """
    files = folder.glob("*.safetensors")
    return sum(_file_bytes(path, dtype, dequantised_bits, widens_float8=widens_float8) for path in files)


def _file_bytes(path: Path, dtype: torch.dtype, dequantised_bits: int | None, *, widens_float8: bool) -> int:
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    total = 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        kind, last = tensor["dtype"], name.rpartition(".")[2]
        widened = kind in _FLOATS or (kind == "F8_E4M3" and widens_float8)
        size = dtype.itemsize if widened else _ITEM_SIZES.get(kind, 1)
        if dequantised_bits is not None and last in _PACKED_INTEGERS and kind in ("I32", "I8"):
            size = dtype.itemsize * (32 // dequantised_bits if kind == "I32" else 1)
        total += math.prod(tensor["shape"]) * size
    return total


def _gguf_bytes(model: str, dtype: torch.dtype, packed: Container[str]) -> int:
    """Return the bytes of all tensors after loading. Matrices of the `packed` types keep their size."""
    from headrace_engine.checkpoints.gguf_reader import read_header  # imports gguf, which other models do not need

    if not Path(model).is_file():
        return 0  # the loader raises the error
    return sum(
        int(tensor.n_bytes)
        if tensor.tensor_type.name in packed and len(tensor.shape) == 2  # the experts of a layer have three dimensions
        else dtype.itemsize * int(tensor.n_elements)
        for tensor in read_header(model).tensors
    )


def check_weights_fit(
    model: str,
    dtype: torch.dtype,
    packed: Container[str] = (),
    dequantised_bits: int | None = None,
    *,
    widens_float8: bool = True,
) -> None:
    """Refuse a local model whose weights exceed the free memory, before the kernel has to kill a process.

    Args:
        packed: the types of a GGUF file whose blocks are kept.
        dequantised_bits, widens_float8: as in `weight_bytes`.

    Raises:
        ConfigError: the weights do not fit. Names the needed and the free bytes.
    """
    needed = (
        _gguf_bytes(model, dtype, packed)
        if is_gguf(model)
        else weight_bytes(Path(model), dtype, dequantised_bits, widens_float8=widens_float8)
    )
    free = available_memory()
    form = "packed blocks" if packed else str(dtype).removeprefix("torch.")
    if needed > free:
        raise ConfigError(
            f"the weights of {model!r} take {needed / 2**30:.1f} GiB as {form}, "
            f"but only {free / 2**30:.1f} GiB of memory are free"
        )


def free_gpu_memory(device: torch.device) -> int:
    """Return the unallocated bytes of a GPU. What torch's allocator caches counts as free."""
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def check_model_fits(model: nn.Module, device: torch.device) -> None:
    """Raise ConfigError if the weights exceed the free memory of the GPU."""
    if device.type != "cuda":
        return
    needed = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    free = free_gpu_memory(device)
    if needed > free:
        raise ConfigError(
            f"the weights take {needed / 2**30:.1f} GiB, but only {free / 2**30:.1f} GiB of the GPU's memory are free"
        )


def release_pages(mapped: np.ndarray[Any, Any]) -> None:
    """Release the whole pages of a part of a file that is mapped for reading. Their content can be read again."""
    begin = -(-mapped.ctypes.data // _PAGE) * _PAGE
    end = (mapped.ctypes.data + mapped.nbytes) // _PAGE * _PAGE
    if end > begin:
        _libc().madvise(begin, end - begin, _MADV_DONTNEED)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def release_unused() -> None:
    """Release memory that is not needed: freed heap, freed GPU memory, and pages of mapped weight files.

    Such pages are read again, mostly from the page cache, if they are accessed. A mapping with modified pages is kept,
    because their content would be lost.
    """
    release_freed_heap()
    torch.cuda.empty_cache()  # does nothing without a GPU
    try:
        regions = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return  # not Linux: the system reclaims clean pages when it needs them
    start = end = 0
    for line in regions:
        key, _, rest = line.partition(" ")
        if "-" in key:
            mapped = rest.endswith((".safetensors", ".gguf"))
            start, end = (int(address, 16) for address in key.split("-")) if mapped else (0, 0)
        elif key == "Anonymous:" and end and rest.split()[0] == "0":
            _libc().madvise(start, end - start, _MADV_DONTNEED)
