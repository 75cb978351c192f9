"""A parent process to be killed: starts the engine of the config on standard input, and prints its process id.

python -m headrace_engine.conformance.parent < CONFIG
"""

import json
import sys

from headrace_engine.core.process import EngineCoreProcess
from headrace_engine.options.config import EngineConfig


def main() -> None:
    core = EngineCoreProcess(EngineConfig.from_wire(json.loads(sys.stdin.readline())))
    core.wait_ready()
    sys.stdout.write(f"{core.pid}\n")
    sys.stdout.flush()
    while core.get_outputs() is not None:  # until the end
        pass


if __name__ == "__main__":
    main()
