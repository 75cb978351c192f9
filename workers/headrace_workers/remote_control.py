"""The remote control commands that a worker adds to Celery's own, which are in `celery_commands.py`.

`celery -A headrace_workers.app inspect engine_stats` and `headrace control stats`, for example, send the same command.
Importing this module registers them.
"""

import math
from typing import Any

from celery.worker.control import control_command, inspect_command

from headrace_monitoring.errors import LogLevelError
from headrace_monitoring.logging import set_level
from headrace_workers.celery_commands import engine_step


@inspect_command()
def engine_stats(state: Any) -> dict[str, Any]:
    """Show counts and states of the worker and its engine, without contents of requests."""
    return engine_step(state).stats()


@control_command()
def pause(state: Any) -> dict[str, str]:
    """Take no more requests; running requests continue."""
    engine_step(state).dispatcher.pause()
    return {"ok": "paused"}


@control_command()
def resume(state: Any) -> dict[str, str]:
    """Take requests again, from every queue of the worker."""
    step = engine_step(state)
    if not all(step.consume(state.consumer, queue) for queue in step.queues) or not step.dispatcher.resume():
        return {"error": "the worker is draining and will stop"}
    return {"ok": "resumed"}


@control_command(args=[("grace_seconds", float)], signature="[grace_seconds]")
def drain(state: Any, grace_seconds: Any = None) -> dict[str, str]:
    """Take no more requests and stop when all have ended; after the grace time, requeue the rest."""
    if grace_seconds is not None and not _is_time(grace_seconds):
        return {"error": "grace_seconds must be a number of seconds, 0 or more"}
    engine_step(state).drain_and_end(grace_seconds)
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
