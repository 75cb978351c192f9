"""Compiles every shape of a runner at its start, so that no request waits for a compiler."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from tqdm.auto import tqdm

from headrace_engine.errors import ConfigError
from headrace_engine.runner.static.compiler_backend import CompilerBackend

logger = logging.getLogger(__name__)

Shape = TypeVar("Shape")


def warm_up(compiler_backend: CompilerBackend, shapes: Sequence[Shape], run: Callable[[Shape], object]) -> float:
    """Run one step of each shape. Return the seconds that this took.

    Args:
        run: runs a step of a shape and waits for its result.

    Raises:
        ConfigError: operators ran on the CPU instead of the device.
    """
    logger.info("compiling %d shapes for %s", len(shapes), compiler_backend.name)
    started = time.perf_counter()
    # a progress bar on a terminal; the log has lines in any case
    bar = tqdm(shapes, desc="Compiling", unit="shape", disable=None)
    for number, shape in enumerate(bar, 1):
        begun = time.perf_counter()
        run(shape)
        logger.info("compiled %d of %d: %s, %.1f s", number, len(shapes), shape, time.perf_counter() - begun)
    if fallbacks := compiler_backend.fallback_operators():
        raise ConfigError(f"{compiler_backend.name} ran operators on the CPU instead: {', '.join(fallbacks)}")
    seconds = time.perf_counter() - started
    logger.info("%d shapes, %d graphs compiled in %.1f s", len(shapes), compiler_backend.num_graphs(), seconds)
    return seconds
