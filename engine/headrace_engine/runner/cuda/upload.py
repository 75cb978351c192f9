"""Copies host arrays to the device: packed in one pinned buffer, with one asynchronous copy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace_engine.runner.cuda.device import is_gpu

_ALIGNMENT = 16
_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class UploadBuffer:
    """A pinned host buffer and a buffer of the same size on the device.

    Arrays of the same sizes always have the same addresses, as captured graphs require.

    Args:
        capacity: bytes of all arrays of one upload, from `upload_bytes`.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        has_events = is_gpu(device)
        self._host = torch.empty(capacity, dtype=torch.uint8, pin_memory=has_events)
        self._bytes: npt.NDArray[np.uint8] = self._host.numpy()
        self._device = torch.zeros(capacity, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if has_events else None  # type: ignore[no-untyped-call]

    def upload(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Return the arrays on the device, one-dimensional. They are valid until the next upload."""
        if self._copied is not None:
            self._copied.synchronize()  # the previous copy must have read the host buffer
        views, end = [], 0
        for array in arrays:
            start, end = end, end + array.nbytes
            self._bytes[start:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            views.append(self._device[start:end].view(_DTYPES[array.dtype]))
            end = _aligned(end)
        self._device[:end].copy_(self._host[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return views


def upload_bytes(*sizes: tuple[int, int]) -> int:
    """Return the bytes for arrays of (elements, bytes of an element)."""
    return sum(_aligned(count * itemsize) for count, itemsize in sizes)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
