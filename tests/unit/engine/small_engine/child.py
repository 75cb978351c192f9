"""The child process of the small engine."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from headrace_engine.core.serving import run
from unit.engine.small_engine.core import SmallCore


def main() -> int:
    status = run(make_core, int(sys.argv[1]), int(sys.argv[2]))
    if FAULT == ["ignores_stop"]:
        time.sleep(600)
    return status


FAULT: list[str] = []


def make_core(config: object) -> SmallCore:
    core = SmallCore(config)
    FAULT.append(core.fault)
    if core.fault == "survives_its_parent":  # a helper that nobody ends, such as the rank of a device
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=True)
    return core


if __name__ == "__main__":
    os._exit(main())
