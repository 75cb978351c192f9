"""Kernels that a wheel contains, for machines without a C compiler. release/kernels.py compiles them.

Each variant is for all processors with some features. A library that this machine's own compiler builds is as fast or
faster, so it comes first.
"""

import hashlib
import platform
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace_engine.runner.native.processor import processor_flags

LIBRARIES: Final = Path(__file__).parent / "libraries"
"""A folder for each variant. Only wheels for one architecture have it."""

_V3: Final = "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
_V4: Final = f"{_V3} avx512f avx512bw avx512cd avx512dq avx512vl"
_BFLOAT16: Final = f"{_V4} avx512_vnni avx512_bf16"


@dataclass(frozen=True, slots=True)
class KernelVariant:
    name: str
    machine: str
    """As `platform.machine()` names it."""
    options: str
    """The compiler's options that select the instructions."""
    features: str = ""
    """What a processor must have, as /proc/cpuinfo names it."""

    def runs_on(self, machine: str, flags: Collection[str]) -> bool:
        return machine == self.machine and set(self.features.split()) <= set(flags)


VARIANTS: Final = (
    KernelVariant(
        "x86-64-v4-amx",
        "x86_64",
        "-march=x86-64-v4 -mavx512vnni -mavx512bf16 -mamx-tile -mamx-bf16",
        f"{_BFLOAT16} amx_tile amx_bf16",
    ),
    KernelVariant("x86-64-v4-bf16", "x86_64", "-march=x86-64-v4 -mavx512vnni -mavx512bf16", _BFLOAT16),
    KernelVariant("x86-64-v4-vnni", "x86_64", "-march=x86-64-v4 -mavx512vnni", f"{_V4} avx512_vnni"),
    KernelVariant("x86-64-v4", "x86_64", "-march=x86-64-v4", _V4),
    KernelVariant("x86-64-v3-vnni", "x86_64", "-march=x86-64-v3 -mavxvnni", f"{_V3} avx_vnni"),
    KernelVariant("x86-64-v3", "x86_64", "-march=x86-64-v3", _V3),
    KernelVariant("armv8-a", "aarch64", "-march=armv8-a"),
)
"""The fastest first."""


def library_name(source_name: str, source: str) -> str:
    """Return the name of a library. It changes with the source, so that a stale library is not loaded."""
    return f"{Path(source_name).stem}-{hashlib.sha256(source.encode()).hexdigest()[:16]}.so"


def best_variant() -> KernelVariant | None:
    """Return the fastest installed variant that this processor can run; None if there is none."""
    machine, flags = platform.machine(), processor_flags().split()
    return next((each for each in VARIANTS if (LIBRARIES / each.name).is_dir() and each.runs_on(machine, flags)), None)


def find(source_name: str, source: str) -> Path | None:
    """Return the library of a C file for this processor; None if there is none."""
    variant = best_variant()
    if variant is None:
        return None
    library = LIBRARIES / variant.name / library_name(source_name, source)
    return library if library.is_file() else None
