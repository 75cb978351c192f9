"""Memory in huge pages for data that every step reads: packed weights, keys and values.

With small pages, the processor translates an address for every 4 KiB, and its prefetcher stops at each page.
"""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch

_REGION = 64 << 20  # bytes of one allocation: pages become resident only on first use
_HUGE_PAGE = 2 << 20
_ALIGNMENT = 64


class HugePages:
    """Allocates tensors in large regions. A region is freed when no tensor uses it any more."""

    def __init__(self) -> None:
        self._region = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor with undefined content. Raises MemoryError."""
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return torch.empty(*shape, dtype=dtype)
        if size > self._region.numel():
            self._region = _region(max(size, _REGION))
        tensor = self._region[:size].view(dtype).view(*shape)
        self._region = self._region[-(-size // _ALIGNMENT) * _ALIGNMENT :]
        return tensor


def _region(size: int) -> torch.Tensor:
    """Map bytes that begin at the boundary of a huge page."""
    try:
        mapped = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError) as error:
        raise MemoryError(f"{size / 2**20:.0f} MiB cannot be allocated: {error}") from error
    # Optional: without huge pages, or on systems other than Linux, everything works but more slowly.
    with suppress(OSError, AttributeError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    begin = -whole.data_ptr() % _HUGE_PAGE
    return whole[begin : begin + size]
