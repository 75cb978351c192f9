"""Celery's remote control commands of a worker: `celery -A headrace_workers.app inspect engine_stats`, `control pause`.

`headrace control` sends the same. Importing this module registers them.
"""

import math
from typing import TYPE_CHECKING, Any

from celery.worker.control import control_command, inspect_command

from headrace_monitoring.errors import LogLevelError
from headrace_monitoring.logging import set_level

if TYPE_CHECKING:
    from headrace_workers.bootsteps import EngineStep


@inspect_command()
def engine_stats(state: Any) -> dict[str, Any]:
    """What the worker and its engine are doing: counts and states, nothing of what a request says."""
    return _engine_step(state).stats()


@control_command()
def pause(state: Any) -> dict[str, str]:
    """Take no more requests; those that run go on."""
    _engine_step(state).dispatcher.pause()
    return {"ok": "paused"}


@control_command()
def resume(state: Any) -> dict[str, str]:
    """Take requests again."""
    if not _engine_step(state).dispatcher.resume():
        return {"error": "the worker drains, and will end"}
    return {"ok": "resumed"}


@control_command(args=[("grace_seconds", float)], signature="[grace_seconds]")
def drain(state: Any, grace_seconds: Any = None) -> dict[str, str]:
    """Take no more requests and end when those that run have ended; after the grace, hand them back."""
    if grace_seconds is not None and not _is_time(grace_seconds):
        return {"error": "grace_seconds must be a number of seconds, 0 or more"}
    _engine_step(state).drain_and_end(grace_seconds)
    return {"ok": "draining"}


@control_command(args=[("level", str)], signature="<level>")
def log_level(state: Any, level: Any = None) -> dict[str, str]:  # noqa: ARG001  # Celery's signature
    """Change the log level of the running worker."""
    try:
        before = set_level(level)
    except LogLevelError as error:
        return {"error": str(error)}
    return {"ok": f"log level {level.upper()}, was {before}"}


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _engine_step(state: Any) -> "EngineStep":
    step: EngineStep = state.consumer.controller.headrace
    return step
