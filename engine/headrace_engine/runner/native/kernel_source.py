"""The text of a kernel, and the compiler's options for it. Imports no torch."""

import re
from importlib.resources import files
from typing import Final

FLAGS: Final = [
    *("-O3", "-fopenmp", "-fno-math-errno", "-ffp-contract=fast", "-shared", "-fPIC"),
    "-D_GNU_SOURCE",  # for functions of the C library that only Linux has
]
"""The options for every processor. Those that select its instructions follow."""


def source_text(package: str, source_name: str) -> str:
    """Return a C file with its own headers inlined: the text to compile, and the key of the library."""
    folder = files(package)
    return re.sub(
        r'^#include "(.+)"$',
        lambda found: folder.joinpath(found[1]).read_text(),
        folder.joinpath(source_name).read_text(),
        flags=re.MULTILINE,
    )
