"""`headrace streams`: the servers on which streams are placed."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import click

from headrace_broker.client.unavailable import unavailable
from headrace_broker.server.connections import connect
from headrace_broker.server.queue_servers import QueueServers
from headrace_broker.server.stream_servers import StreamServers
from headrace_broker.server.stream_table_editor import StreamTableEditor, shown_time
from headrace_cli.commands import options

_name = click.argument("name")


@click.group()
def streams() -> None:
    """List or change the servers on which streams are placed.

    The table of the servers is in Redis. HEADRACE_STREAM_URLS has their URLs, in the environment of every worker,
    client, gateway and exporter (docs/scale.md).
    """


@streams.command("list")
@options.redis_url
@options.as_json
def list_servers(redis_url: str, as_json: bool) -> None:
    """List the servers of the table, and those of HEADRACE_STREAM_URLS that are not in it."""
    with _editor(redis_url) as editor:
        states = list(editor.states())
    if as_json:
        click.echo(json.dumps([asdict(state) for state in states]))
        return
    for state in states:
        times = f"since {shown_time(state.since)}" if state.since else "not in the table"
        until = f", until {shown_time(state.until)}" if state.until else ""
        click.echo(f"{state.name}  {state.state}  {times}{until}  {state.problem or 'ok'}")


@streams.command("enable")
@options.redis_url
@options.as_json
def enable(redis_url: str, as_json: bool) -> None:
    """Place new streams on all servers of HEADRACE_STREAM_URLS. Upgrade all workers, clients and gateways first."""
    with _editor(redis_url) as editor:
        names = editor.enable()
    _done(as_json, "enabled", names)


@streams.command("add")
@_name
@options.redis_url
@options.as_json
def add(name: str, redis_url: str, as_json: bool) -> None:
    """Place new streams on the server NAME, too. Every process must have its URL first."""
    with _editor(redis_url) as editor:
        editor.add(name)
    _done(as_json, "added", [name])


@streams.command("drain")
@_name
@options.redis_url
@options.as_json
def drain(name: str, redis_url: str, as_json: bool) -> None:
    """Place no new streams on the server NAME. Streams that are there continue."""
    with _editor(redis_url) as editor:
        editor.drain(name)
    _done(as_json, "drained", [name])


@streams.command("forget")
@_name
@click.option("--lost", is_flag=True, help="The server is gone for good with its streams: give up what was there.")
@options.redis_url
@options.as_json
def forget(name: str, lost: bool, redis_url: str, as_json: bool) -> None:
    """Remove the drained server NAME, which has no streams left, from the table.

    With --lost, the server need not answer. Requests that had begun there end with the error stream_lost, and the
    others move to other servers. NAME stays in the table as lost until it is forgotten once more, or added again.
    """
    with _editor(redis_url) as editor:
        editor.forget(name, is_lost=lost)
    _done(as_json, "lost" if lost else "forgotten", [name])


@contextmanager
def _editor(redis_url: str) -> Iterator[StreamTableEditor]:
    settings = options.broker_settings(redis_url)
    with (
        unavailable(settings, "read or change the stream servers"),
        connect(settings.redis_url) as client,
        QueueServers(client, settings.url_by_queue) as queues,
        StreamServers.connected(client, *settings.stream_servers) as servers,
    ):
        yield StreamTableEditor(servers, queues)


def _done(as_json: bool, what: str, names: list[str]) -> None:
    click.echo(json.dumps({what: names}) if as_json else f"{what}: {', '.join(names)}")
