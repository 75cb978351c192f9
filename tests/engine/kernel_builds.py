"""Compiled kernels as for other processors than this one."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from headrace_engine.runner import native_library

NO_TILES_LENT = "-DXFEATURE_XTILEDATA=63"
"""Linux refuses to lend matrix tiles, as it knows no such feature."""

OTHER_PROCESSORS = [
    NO_TILES_LENT,
    "-mno-amx-bf16",
    "-mno-avx512bf16",
    "-mno-avx512vl",
    "-mno-avx512dq",
    "-mno-avx512f",
    "-mno-avx",
]
"""What they lack, each as the compiler's flag."""


def build(source_name: str, package: str, without: str, folder: Path) -> ctypes.CDLL:
    source = native_library.source_text(f"headrace_engine.runner.{package}", source_name)
    target = folder / "kernel.so"
    command = ["cc", *native_library._FLAGS, without, "-x", "c", "-", "-o", str(target), "-lm"]
    subprocess.run(command, input=source, text=True, check=True)
    return ctypes.CDLL(str(target))
