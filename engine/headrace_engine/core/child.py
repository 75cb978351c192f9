"""The child process of Headrace's own engine: `python -m headrace_engine.core.child READ_FD WRITE_FD`."""

import gc
import sys

from headrace_engine.core.runner_factory import create_runner
from headrace_engine.core.serving import Core, run
from headrace_engine.options.config import EngineConfig
from headrace_engine.runner.contracts import ModelRunner


def _make_core(config: EngineConfig) -> Core:
    from headrace_engine.core.engine_core import EngineCore  # imported here, so that `run` reports a missing package

    return EngineCore(config, _import_runner(config))


def _import_runner(config: EngineConfig) -> ModelRunner:
    """Create the runner. Its imports create half a million permanent objects, so keep them from garbage collection.

    Otherwise collection would take an eighth of the import time. Later it would now and then stall a step for a quarter
    of a second.
    """
    gc.disable()
    try:
        return create_runner(config)
    finally:
        gc.freeze()
        gc.enable()


if __name__ == "__main__":
    sys.exit(run(_make_core, int(sys.argv[1]), int(sys.argv[2])))
