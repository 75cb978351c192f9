"""The remote control commands of a worker: its own, and replacements for those of Celery that do not fit it.

Celery's commands assume a pool of processes, a prefetch count and messages that a worker holds until their ETA. Here
requests run in the engine, and Redis holds waiting messages. A command without a meaning here answers with an error and
an alternative. All other commands are Celery's own. `celery -A headrace_workers.app inspect engine_stats` and
`headrace control stats`, for example, send the same command. Importing this module registers the commands."""

import platform
import re
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from celery.app.utils import HIDDEN_SETTINGS
from celery.exceptions import WorkerShutdown
from celery.platforms import EX_OK
from celery.utils.serialization import jsonify
from celery.worker import control
from kombu.utils.encoding import safe_repr

from headrace_broker.messages import TASK_NAME
from headrace_broker.queue.delayed_messages import DelayedMessage, delayed_messages
from headrace_wire.values import MAX_ID_CHARS, is_request_id

if TYPE_CHECKING:
    from headrace_workers.celery.bootsteps import EngineStep

import math

from celery.worker.control import control_command, inspect_command

from headrace_monitoring.errors import LogLevelError
from headrace_monitoring.logging import set_level

_SLOTS: Final = (
    "this worker has no pool to resize: requests run in its engine, whose slots --max-num-seqs sets when it starts"
)
REFUSED: Final = {
    "pool_grow": _SLOTS,
    "pool_shrink": _SLOTS,
    "autoscale": _SLOTS,
    "pool_restart": "this worker has no pool to restart: start another worker, then drain or shut down this one",
    "rate_limit": "rate limits are not supported: a worker takes as many requests as its engine has slots for"
    " (--max-num-seqs), and tenants share them by weight (--tenant-weights)",
    "time_limit": "time limits of a task are not supported: send time_limit or expires with each request",
    "election": "elections are not supported: workers share nothing but the queue",
    "objgraph": "object graphs are not supported: they would be written to the worker's disk",
}
"""Why each of these commands does nothing."""

_MAX_IDS: Final = 1000
_URL_SECRETS: Final = re.compile(r"(?<=://)[^/@]*@|\?[^;]*")
_MAX_SCHEDULED: Final = 100


def engine_step(state: Any) -> "EngineStep":
    """Get the worker's own step from the state that Celery passes to each command."""
    return state.app.tasks[TASK_NAME].step


def conf(state: Any, with_defaults: Any = False, **_: Any) -> dict[str, Any]:
    """Show Celery's settings without secrets. Celery's own command fails for a Unix socket, and shows ?password=."""
    table = state.app.conf.table(with_defaults=bool(with_defaults), censored=False)
    shown: dict[str, Any] = jsonify(
        table, keyfilter=lambda key: isinstance(key, str) and not key.startswith("__"), unknown_type_filter=safe_repr
    )
    return {name: _censored(name, value) for name, value in shown.items()}


def report(state: Any, **_: Any) -> dict[str, str]:
    """Show versions and settings, for a bug report."""
    versions = " ".join(f"{name}:{version(name)}" for name in ("headrace", "celery", "kombu", "redis"))
    settings = "\n".join(f"{name}: {value!r}" for name, value in conf(state).items())
    return {"ok": f"{versions} python:{platform.python_version()}\n{platform.platform()}\n\n{settings}"}


def stats(state: Any, **_: Any) -> dict[str, Any]:
    """Show Celery's figures, with the engine's slots as the pool's size and without the connection's options."""
    figures: dict[str, Any] = state.consumer.controller.stats()
    slots = engine_step(state).dispatcher.stats()["slots"]
    figures["pool"] = {**figures.get("pool", {}), "max-concurrency": slots}
    figures["prefetch_count"] = slots
    broker = figures.get("broker")
    if isinstance(broker, dict):
        # a socket's path, Sentinels and their options may hold a password
        shown = ("transport", "hostname", "port", "virtual_host", "userid", "ssl", "heartbeat")
        figures["broker"] = {name: broker[name] for name in shown if name in broker and _is_plain(broker[name])}
    return figures


def scheduled(state: Any, **_: Any) -> list[dict[str, Any]]:
    """List the first hundred messages whose ETA has not passed. They are in Redis, so every worker lists the same."""
    step = engine_step(state)
    messages = [
        message for name in step.queues for message in delayed_messages(step.servers.of(name), name, _MAX_SCHEDULED)
    ]
    return [_schedule_entry(message) for message in sorted(messages, key=lambda message: message.due)[:_MAX_SCHEDULED]]


def add_consumer(state: Any, queue: Any = None, **_: Any) -> dict[str, str]:
    """Undo `cancel_consumer`. Refuses other queues than the worker was started with: they belong to other models."""
    step = engine_step(state)
    if queue not in step.queues:
        return {
            "error": f"this worker serves {' and '.join(step.queues)}: the queues of a worker are those of its model,"
            " set when it starts (--served-model-name, --queues)"
        }
    if not step.consume(state.consumer, queue):
        return {"error": "the worker is draining and will stop"}
    return {"ok": f"add consumer {queue}"}


def cancel_consumer(state: Any, queue: Any = None, **_: Any) -> dict[str, str]:
    """Take no more messages from the queue. Running requests continue. A worker without a queue is not ready."""
    step = engine_step(state)
    if queue not in step.queues:
        return {"error": f"this worker serves {' and '.join(step.queues)}, and no other queue"}
    step.stop_consuming(state.consumer, queue)
    return {"ok": f"no longer consuming from {queue}"}


def enable_events(state: Any, **_: Any) -> dict[str, str]:
    """Send task events. Celery's event dispatcher sends all events if it has no groups."""
    groups = state.consumer.event_dispatcher.groups
    if not groups or "task" in groups:
        return {"ok": "task events already enabled"}
    groups.add("task")
    return {"ok": "task events enabled"}


def disable_events(state: Any, **_: Any) -> dict[str, str]:
    """Send no task events. Celery's own command wrongly treats an empty set of groups as no events."""
    groups = state.consumer.event_dispatcher.groups
    if groups and "task" not in groups:
        return {"ok": "task events already disabled"}
    groups.add("worker")
    groups.discard("task")
    return {"ok": "task events disabled"}


def shutdown(_state: Any, **_: Any) -> None:
    """Stop the worker as SIGTERM does: running requests may finish within the grace period."""
    raise WorkerShutdown(EX_OK)


def revoke(state: Any, task_id: Any = None, **options: Any) -> dict[str, str]:
    """Run Celery's command if the ids are valid."""
    return {"error": _IDS} if _bad_ids(task_id) else control.revoke(state, task_id, **options)


def terminate(state: Any, signal: Any = None, task_id: Any = None, **_: Any) -> dict[str, str]:
    """Revoke with terminate=True."""
    return revoke(state, task_id, terminate=True, signal=signal)


def revoke_by_stamped_headers(state: Any, headers: Any = None, **options: Any) -> dict[str, str]:
    """Run Celery's command if the headers are valid."""
    if isinstance(headers, list) and all(isinstance(pair, str) and pair.count("=") == 1 for pair in headers):
        headers = dict(pair.split("=") for pair in headers)
    if not isinstance(headers, dict) or any(map(_bad_ids, (list(headers), *headers.values()))):
        return {"error": f"headers must be stamps and their values, each {_NAMES}"}
    return control.revoke_by_stamped_headers(state, headers, **options)


def hello(state: Any, from_node: Any = None, revoked: Any = None, **_: Any) -> dict[str, Any]:
    """Answer a starting worker. It sends the ids that it knows to be revoked."""
    ids = list(revoked or [])
    if _bad_ids(from_node) or _bad_ids(ids, most=control.worker_state.REVOKES_MAX):
        return {"error": _IDS}
    return control.hello(state, from_node, ids) or {}


def _refuse(why: str, _state: Any, **_: Any) -> dict[str, str]:
    return {"error": why}


_NAMES: Final = f"a text of 1 to {MAX_ID_CHARS} characters, or a list of at most {_MAX_IDS}"
_IDS: Final = f"task_id must be {_NAMES}"


def _bad_ids(value: Any, most: int = _MAX_IDS) -> bool:
    ids = [value] if isinstance(value, str) else value
    return not isinstance(ids, list | tuple) or len(ids) > most or not all(map(is_request_id, ids))


def _censored(name: str, value: Any) -> Any:
    """Hide a setting whose name says that it is secret, and users, passwords and options in URLs."""
    if isinstance(value, dict):
        return {inner: _censored(str(inner), of) for inner, of in value.items()}
    if isinstance(value, list | tuple):
        return [_censored("", of) for of in value]
    if HIDDEN_SETTINGS.search(name) and value:
        return "********"
    return _URL_SECRETS.sub("", value) if isinstance(value, str) and "://" in value else value


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number or a name without `@`, so that it cannot be a URL with a password."""
    return value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and "@" not in value)


def _schedule_entry(message: DelayedMessage) -> dict[str, Any]:
    request_id, task = message.headers.get("id"), message.headers.get("task")
    return {
        "eta": datetime.fromtimestamp(message.due, UTC).isoformat(),
        "priority": message.priority,
        "request": {
            "id": request_id,
            "name": task,
            "type": task,
            "args": "",
            "kwargs": "",
            "hostname": None,
            "time_start": None,
            "acknowledged": False,
            "delivery_info": {"routing_key": message.queue, "priority": message.priority},
            "worker_pid": None,
        },
    }


_OURS: Final = {
    "conf": conf,
    "dump_conf": conf,
    "report": report,
    "stats": stats,
    "scheduled": scheduled,
    "dump_schedule": scheduled,
    "add_consumer": add_consumer,
    "cancel_consumer": cancel_consumer,
    "enable_events": enable_events,
    "disable_events": disable_events,
    "shutdown": shutdown,
    "revoke": revoke,
    "terminate": terminate,
    "revoke_by_stamped_headers": revoke_by_stamped_headers,
    "hello": hello,
}

control.Panel.data.update(_OURS)
control.Panel.data.update({name: partial(_refuse, why) for name, why in REFUSED.items()})


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
