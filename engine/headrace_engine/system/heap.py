"""The heap of this process."""

import ctypes


def release_freed_heap() -> None:
    """Return freed memory to the system, which glibc does not do by itself. Does nothing with other C libraries."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
