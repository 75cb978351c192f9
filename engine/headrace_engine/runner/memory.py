"""Memory: what is free, and the release of what is not needed."""

import contextlib
import ctypes
import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from headrace_engine.errors import ConfigError
from headrace_engine.system import control_group
from headrace_engine.system.heap import release_freed_heap

_PAGE = os.sysconf("SC_PAGE_SIZE")
_MADV_DONTNEED = 4


def available_memory() -> int:
    """Return the bytes that are available without swapping, within the limits of the control groups."""
    free = os.sysconf("SC_AVPHYS_PAGES") * _PAGE
    with contextlib.suppress(OSError, ValueError, StopIteration), Path("/proc/meminfo").open() as lines:
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    room = control_group.memory_room()
    return free if room is None else min(free, room)


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
