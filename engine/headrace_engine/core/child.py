"""The child process of Headrace's own engine: `python -m headrace_engine.core.child READ_FD WRITE_FD`."""

import gc
import sys
from collections.abc import Callable
from typing import TypeVar

from headrace_engine.checkpoints.pooling_folder import read_pooling_spec
from headrace_engine.core.runner_factory import create_pooling_runner, create_runner
from headrace_engine.core.serving import Core, run
from headrace_engine.options.config import EngineConfig

Runner = TypeVar("Runner")


def _make_core(config: EngineConfig) -> Core:
    # the cores are imported here, so that `run` reports a missing package
    if read_pooling_spec(config.model.model) is not None:
        from headrace_engine.core.pooling_core import PoolingCore

        return PoolingCore(config, _import_runner(create_pooling_runner, config))
    from headrace_engine.core.engine_core import EngineCore

    return EngineCore(config, _import_runner(create_runner, config))


def _import_runner(create: Callable[[EngineConfig], Runner], config: EngineConfig) -> Runner:
    """Create the runner. Its imports create half a million permanent objects, so keep them from garbage collection.

    Otherwise collection would take an eighth of the import time. Later it would now and then stall a step for a quarter
    of a second.
    """
    gc.disable()
    try:
        return create(config)
    finally:
        gc.freeze()
        gc.enable()


if __name__ == "__main__":
    sys.exit(run(_make_core, int(sys.argv[1]), int(sys.argv[2])))
