"""Adds compiled kernels to a wheel, if HEADRACE_KERNELS names their folder and HEADRACE_WHEEL_PLATFORM its tag.

Without these variables a wheel has the C sources alone, and fits every machine with a compiler. `make release` builds
both kinds.
"""

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelHook(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        kernels = os.environ.get("HEADRACE_KERNELS")
        if not kernels or version == "editable":
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{os.environ['HEADRACE_WHEEL_PLATFORM']}"
        for library in Path(kernels).glob("*/*.so"):
            target = f"headrace_engine/runner/native/libraries/{library.parent.name}/{library.name}"
            build_data["force_include"][str(library)] = target
