"""Encodes and decodes maps of stream entries and registry values as msgpack that Lua can read too."""

import threading
from typing import Any, Final

import msgpack

from headrace_broker.errors import MalformedEntryError


class _ThreadPacker(threading.local):
    """Holds one packer per thread. Making one can cost more than packing a chunk, and threads cannot share one."""

    def __init__(self) -> None:
        self.pack: Final = msgpack.Packer(use_bin_type=False).pack


_packer: Final = _ThreadPacker()


def pack(data: Any) -> bytes:
    """Encode as msgpack without its separate binary type, so that Redis's cmsgpack can decode it too."""
    packed: bytes = _packer.pack(data)
    return packed


def pack_rows(data: Any) -> bytes:
    """Encode as msgpack with its binary type, which `pack` lacks. No script decodes such an entry."""
    packed: bytes = msgpack.packb(data)
    return packed


def unpack(packed: bytes) -> dict[str, Any]:
    """Decode a msgpack map. Raises MalformedEntryError for anything else."""
    try:
        data = msgpack.unpackb(packed, raw=False)
    except Exception as error:  # msgpack's own errors have no common base
        raise MalformedEntryError(f"not a msgpack map: {type(error).__name__}") from error
    if not isinstance(data, dict):
        raise MalformedEntryError(f"not a msgpack map but {type(data).__name__}")
    return data
