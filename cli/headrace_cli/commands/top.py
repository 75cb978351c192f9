"""`headrace top`: show the service live in the terminal."""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headrace_broker.app import make_app
from headrace_broker.client.unavailable import unavailable
from headrace_broker.server.connections import connect
from headrace_broker.server.queue_servers import QueueServers
from headrace_cli.commands import options
from headrace_cli.service_sampler import ServiceSampler, report

_DASH = "–"  # noqa: RUF001  # a cell without a value


@click.command()
@options.redis_url
@click.option(
    "--interval", type=click.FloatRange(0.2, 60), default=2.0, show_default=True, metavar="S", help="Update interval."
)
@click.option("--once", is_flag=True, help="Print the tables once and exit.")
@options.as_json
def top(redis_url: str, interval: float, once: bool, as_json: bool) -> None:
    """Show queues, workers, slots, rates, time to first token, KV use and the slowest requests, live.

    The command reads Redis, and asks the workers through Celery's remote control. --json prints one report, with the
    rates of one interval, and exits. Press Ctrl-C to stop.
    """
    settings = options.broker_settings(redis_url)
    with (
        suppress(KeyboardInterrupt),
        make_app(settings) as app,
        unavailable(settings, "read the state of the service"),
        connect(settings.redis_url) as client,
        QueueServers(client, settings.url_by_queue) as servers,
    ):
        _show(ServiceSampler(client, app, servers=servers), interval, once=once, as_json=as_json)


def _show(sampler: ServiceSampler, interval: float, *, once: bool, as_json: bool) -> None:
    before = sampler.sample()
    time.sleep(interval)
    if as_json or once:
        found = report(sampler.sample(), before)
        if as_json:
            click.echo(json.dumps(found))
        else:
            Console().print(draw(found))
        return
    with Live(draw(report(before, None)), auto_refresh=False, screen=True) as live:
        while True:
            sample = sampler.sample()
            live.update(draw(report(sample, before)), refresh=True)
            before = sample
            time.sleep(interval)


def draw(found: Mapping[str, Any]) -> Group:
    """Return the report as tables."""
    queues = _table("Queues", "model", "ready", "leased", "expired", "dead", "oldest")
    for queue in found["queues"]:
        counts = (str(queue[name]) for name in ("ready", "leased", "run_out", "dead"))
        queues.add_row(Text(queue["model"]), *counts, _seconds(queue["oldest_age_seconds"]))
    workers = _table(
        "Workers", "worker", "model", "state", "slots", "running", "waiting", "KV", "tokens/s", "inputs/s", "TTFT"
    )
    for worker in found["workers"]:
        rates, usage = (worker["tokens_per_second"], worker["inputs_per_second"]), worker["kv_cache_usage_ratio"]
        workers.add_row(
            Text(worker["name"]),
            Text(worker["model"]),
            Text(worker["state"], style="green" if worker["state"] == "ready" else "yellow"),
            f"{worker['slots_used']}/{worker['slots']}",
            *(_DASH if worker[name] is None else str(worker[name]) for name in ("running", "waiting")),
            _DASH if usage is None else f"{usage:.0%}",
            *(_DASH if rate is None else f"{rate:.1f}" for rate in rates),
            _seconds(worker["mean_time_to_first_token_seconds"]),
        )
    slowest = _table("Slowest requests", "request", "worker", "attempt", "done", "time here")
    for request in found["slowest_requests"]:
        done = next(f"{request[unit]} {unit}" for unit in ("tokens", "inputs") if unit in request)
        about = (Text(request["request_id"]), Text(request["worker"]), str(request["attempt"]))
        slowest.add_row(*about, done, _seconds(request["seconds"]))
    return Group(queues, workers if found["workers"] else Text("No worker answered.", style="bold red"), slowest)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", expand=True)
    for column in columns:
        table.add_column(column, justify="left" if column in ("request", "worker", "model", "state") else "right")
    return table


def _seconds(value: float | None) -> str:
    if value is None:
        return _DASH
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
