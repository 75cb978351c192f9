"""Memory in huge pages, for what every step reads: packed weights, keys and values.

With small pages the processor looks up an address for each 4 KiB that it reads, and stops reading ahead at each.
"""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch

_REGION = 64 << 20  # bytes asked of the system at a time: pages are touched on first use only
_HUGE_PAGE = 2 << 20
_ALIGNMENT = 64


class HugePages:
    """Gives out parts of large regions; a region is given back when no tensor lies in it any more."""

    def __init__(self) -> None:
        self._region = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of that shape, its content undefined. Raises MemoryError."""
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return torch.empty(*shape, dtype=dtype)
        if size > self._region.numel():
            self._region = _region(max(size, _REGION))
        tensor = self._region[:size].view(dtype).view(*shape)
        self._region = self._region[-(-size // _ALIGNMENT) * _ALIGNMENT :]
        return tensor


def _region(size: int) -> torch.Tensor:
    """Bytes that begin where a huge page can."""
    try:
        mapped = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError) as error:
        raise MemoryError(f"the system gives no {size / 2**20:.0f} MiB: {error}") from error
    # A kernel without huge pages serves as well, only more slowly; so do systems other than Linux.
    with suppress(OSError, AttributeError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    begin = -whole.data_ptr() % _HUGE_PAGE
    return whole[begin : begin + size]
