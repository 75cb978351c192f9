"""Checks of this machine: ports, and disks."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from headrace_cli.doctor.finding import Finding
from headrace_cli.errors import PortTakenError
from headrace_cli.local.service import check_free

_PROBE_BYTES: Final = 1 << 20
_LOW_BYTES: Final = 512 << 20
"""Free bytes below which a disk is nearly full. The default model and the kernels take 270 MB."""


def check_port(host: str, port: int, flag: str) -> Finding:
    """Check that a process could listen. `flag` is the option that chooses another port."""
    if port == 0:
        return Finding("port", "ok", f"{flag} takes a free port.")
    try:
        check_free(host, port)
    except PortTakenError as error:
        reason = str(error.__cause__.strerror if isinstance(error.__cause__, OSError) else error)
        text = f"{flag}: nothing more can listen on {host} port {port} ({reason})."
        return Finding(
            "port", "failed", text, f"stop the program that listens there, or choose another port with {flag}"
        )
    return Finding("port", "ok", f"{flag}: {host} port {port} is free.")


def check_disk(folder: Path, holds: str) -> Finding:
    """Check that a folder can be written, and that its disk is not full. A missing folder is not made.

    Args:
        holds: what the folder is for.
    """
    place = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    try:
        with tempfile.TemporaryFile(dir=place, buffering=0) as file:
            for _ in range(_PROBE_BYTES >> 16):
                file.write(bytes(1 << 16))
            os.fsync(file.fileno())
    except OSError as error:
        text = f"{folder}, for {holds}, cannot be written: {error.strerror}."
        return Finding("disk", "failed", text, "free some space, or choose another folder")
    left = shutil.disk_usage(place).free
    if left < _LOW_BYTES:
        text = f"{folder}, for {holds}, has {left / 2**20:.0f} MiB left."
        return Finding("disk", "warning", text, f"free some space: at least {_LOW_BYTES / 2**20:.0f} MiB")
    return Finding("disk", "ok", f"{folder}, for {holds}, has {left / 2**30:.1f} GiB left.")
