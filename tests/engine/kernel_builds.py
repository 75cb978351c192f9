"""Compiled kernels as for other processors than this one."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

from headrace_engine.runner.native import native_library

NO_MATRIX_TILES = "-DXFEATURE_XTILEDATA=63"
"""Linux refuses to enable matrix tiles: it does not know the feature."""

PAIRS_ARE_FASTER = "-mno-amx-bf16 -D__builtin_cpu_is(vendor)=0"
"""As for another maker's processor than Intel's, whose vectors are slow at pairs of bfloat16."""

PAIRS_ARE_SLOWER = "-mno-amx-bf16 -D__builtin_cpu_is(vendor)=1"

OTHER_PROCESSORS = [
    NO_MATRIX_TILES,
    PAIRS_ARE_FASTER,
    PAIRS_ARE_SLOWER,
    "-mno-amx-bf16",
    "-mno-avx512bf16",
    "-mno-avx512vl",
    "-mno-avx512dq",
    "-mno-avx512f",
    "-mno-avx",
]
"""What they lack or are, as flags of the compiler."""

MAY_MULTIPLY_PAIRS = (NO_MATRIX_TILES, PAIRS_ARE_FASTER, "-mno-amx-bf16", "-mno-avx512vl")


@functools.cache
def build(source_name: str, package: str, without: str) -> ctypes.CDLL:
    """Build a library once for all tests of this process: it takes seconds."""
    source = native_library.source_text(f"headrace_engine.runner.{package}", source_name)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "kernel.so"
        command = ["cc", *native_library._FLAGS, *without.split(), "-x", "c", "-", "-o", str(target), "-lm"]
        subprocess.run(command, input=source, text=True, check=True)
        return ctypes.CDLL(str(target))
