"""`headrace queue`: list the queues, or empty one."""

import json
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from headrace_broker.client.client import Client
from headrace_broker.client.unavailable import unavailable
from headrace_broker.keys import queue_name
from headrace_broker.models.registry import known_models
from headrace_broker.queue.levels import QueueLevelReader, QueueLevels, read_tenants
from headrace_broker.queue.unread_lists import lists_on_main, remedy, unread_lists
from headrace_broker.server.connections import CONNECTION_ERRORS, connect
from headrace_broker.server.queue_servers import QueueServers
from headrace_broker.settings import BrokerSettings
from headrace_cli.commands import options


@click.group()
def queue() -> None:
    """List the queues, or delete the waiting requests of one.

    Celery's own `celery purge`, and Flower, see only new messages: workers sort the others by tenant into other keys.
    """


@queue.command("list")
@click.option("--model", metavar="NAME", multiple=True, help="Only this model's queue; may be repeated.")
@options.redis_url
@options.as_json
def list_queues(model: tuple[str, ...], redis_url: str, as_json: bool) -> None:
    """Count each queue's requests: waiting (by priority and by tenant), delayed, running and dead.

    A message is counted for its tenant after a worker has sorted it: within a second, if a worker runs.
    """
    found = _read(options.broker_settings(redis_url), model)
    if as_json:
        click.echo(json.dumps(found))
        return
    table = Table("model", "waiting", "by priority", "by tenant", "delayed", "running", "dead", "oldest")
    for one in found:
        age = "-" if one["oldest_age_seconds"] is None else f"{one['oldest_age_seconds']:.0f} s"
        counts = (str(one["waiting"]), _counts(one["by_priority"]), _counts(one["by_tenant"]))
        table.add_row(one["model"], *counts, str(one["delayed"]), str(one["running"]), str(one["dead"]), age)
    Console().print(table)
    for one in found:
        if one["problem"] is not None:
            click.echo(f"{one['model']} cannot be served: {one['problem']}", err=True)
        for name, count in one["unread"].items():
            why = remedy(one["queue"], name)
            click.echo(f"no worker reads the list {name!r}, which has {count} message(s): {why}", err=True)


@queue.command("purge")
@click.argument("model")
@click.option("--yes", is_flag=True, help="Do not ask.")
@options.redis_url
@options.as_json
def purge(model: str, yes: bool, redis_url: str, as_json: bool) -> None:
    """Permanently delete the waiting and delayed requests in the queue of MODEL. Running ones continue.

    Each deleted request ends as cancelled: its stream and its result say that it was purged. Exit code 1 if the model
    is unknown, or if you answer no.
    """
    [found] = _read(options.broker_settings(redis_url), [model])
    if not found["is_known"]:
        raise click.ClickException(f"no worker has ever served a model {model!r} here, and its queue is empty")
    if not yes:
        count = found["waiting"] + found["delayed"]
        click.confirm(f"Delete {count} waiting or delayed request(s) of {model}?", abort=True, err=True)
    with Client(options.broker_settings(redis_url)) as client:
        purged = client.purge_queue(model)
    text = f"{purged.waiting + purged.delayed} purged, {purged.delayed} of them delayed"
    click.echo(json.dumps(asdict(purged)) if as_json else text)


def _read(settings: BrokerSettings, models: Any) -> list[dict[str, Any]]:
    with (
        unavailable(settings, "read the queues"),
        connect(settings.redis_url) as client,
        QueueServers(client, settings.url_by_queue) as servers,
    ):
        known = known_models(client)
        names = list(dict.fromkeys(models)) or sorted(known)
        unread: dict[str, dict[str, int]] = {}
        levels = QueueLevelReader(servers.of).read_reachable((queue_name(name) for name in names), client)
        for server, queues in servers.by_server(queue_name(name) for name in {*names, *known}):
            unread |= {queue: {} for queue in queues}
            with nullcontext() if server is client else suppress(*CONNECTION_ERRORS):  # the levels name the server
                unread |= unread_lists(server, queues)
            if server is not client:
                for queue in queues:
                    unread[queue] = dict(Counter(unread[queue]) + Counter(lists_on_main(client, queue)))
        found = []
        for name, (queue, level) in zip(names, levels.items(), strict=True):
            tenants = read_tenants(servers.of(queue), queue) if level.problem is None else {}
            found.append({**_summary(name, level, tenants, name in known), "unread": unread[queue]})
        return found


def _summary(model: str, level: QueueLevels, tenants: dict[str, int], is_registered: bool) -> dict[str, Any]:
    return {
        "model": model,
        "queue": queue_name(model),
        **level.summary(tenants),
        "oldest_age_clock": level.oldest_age_clock,
        "is_known": is_registered or level.num_ready + level.leased > 0,
    }


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name or '(none)'}: {count}" for name, count in counts.items() if count) or "-"
