"""`headrace dead-letters`: messages that are no longer delivered."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import click

from headrace_broker.client.client import Client
from headrace_broker.keys import queue_name
from headrace_broker.queue.dead_letters import DeadLetter
from headrace_cli.commands import options


@click.group("dead-letters")
def dead_letters() -> None:
    """List, inspect, requeue or delete dead letters: messages that are no longer delivered to workers.

    A message becomes a dead letter after too many deliveries, if it kills the engine, or if it cannot be read.
    """


def _selection(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.argument("names", nargs=-1, metavar="[LETTER_OR_REQUEST_ID]..."),
        click.option("--all", "everything", is_flag=True, help="All dead letters that match the other options."),
        click.option("--model", metavar="NAME", help="Only those from this model's queue."),
        click.option("--reason", metavar="TEXT", help="Only those whose reason begins with this text."),
        options.redis_url,
        options.as_json,
    ):
        command = option(command)
    return command


@dead_letters.command("list")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="List at most this many.")
@click.option("--model", metavar="NAME", help="Only those from this model's queue.")
@click.option("--reason", metavar="TEXT", help="Only those whose reason begins with this text.")
@options.redis_url
@options.as_json
def list_letters(limit: int, model: str | None, reason: str | None, redis_url: str, as_json: bool) -> None:
    """List dead letters, the newest first: letter id, request id, age, queue, deliveries and reason."""
    with Client(options.broker_settings(redis_url)) as client:
        letters = [letter for letter in _letters(client)[0] if _matches(letter, model, reason)][:limit]
    if as_json:
        click.echo(json.dumps([_summary(letter) for letter in letters]))
        return
    for letter in letters:
        age = f"{time.time() - (letter.at or 0):.0f} s"
        click.echo(
            f"{letter.letter_id}  {letter.request_id or '-'}  {age} ago  {letter.queue}  "
            f"{letter.deliveries} deliveries  {letter.reason}"
        )


@dead_letters.command("inspect")
@click.argument("name", metavar="LETTER_OR_REQUEST_ID")
@click.option("--body", is_flag=True, help="Also print the body of the message, with its prompt.")
@options.redis_url
def inspect_letter(name: str, body: bool, redis_url: str) -> None:
    """Print one dead letter as JSON, without its prompt unless --body is given."""
    with Client(options.broker_settings(redis_url)) as client:
        [letter, *_] = _select(_letters(client)[0], (name,), False, None, None)
    found = _summary(letter)
    if body:
        found["body"] = letter.body.decode(errors="backslashreplace")
    click.echo(json.dumps(found, indent=2))


@dead_letters.command("requeue")
@_selection
def requeue_letters(redis_url: str, as_json: bool, **selection: Any) -> None:
    """Return messages to their queues under their old ids; their requests start over.

    Exit code 1 if a server of queues is away. The messages of the others are returned.
    """
    with Client(options.broker_settings(redis_url)) as client:
        letters, is_complete = _letters(client)
        count = len(client.requeue_dead_letters(_select(letters, **selection)))
    click.echo(json.dumps({"requeued": count}) if as_json else f"{count} requeued")
    sys.exit(not is_complete)


@dead_letters.command("purge")
@_selection
def purge_letters(redis_url: str, as_json: bool, **selection: Any) -> None:
    """Delete messages permanently.

    Exit code 1 if a server of queues is away. The messages of the others are deleted.
    """
    with Client(options.broker_settings(redis_url)) as client:
        letters, is_complete = _letters(client)
        count = client.purge_dead_letters(_select(letters, **selection))
    click.echo(json.dumps({"purged": count}) if as_json else f"{count} deleted")
    sys.exit(not is_complete)


def _letters(client: Client) -> tuple[list[DeadLetter], bool]:
    """Return the dead letters of all servers that answer, and whether these are all servers. Name the others."""
    missing: list[str] = []
    letters = client.dead_letters(on_away=missing.append)
    for message in missing:
        click.echo(message, err=True)
    return letters, not missing


def _select(
    letters: list[DeadLetter], names: tuple[str, ...], everything: bool, model: str | None, reason: str | None
) -> list[DeadLetter]:
    if everything == bool(names):
        raise click.UsageError("give letter ids or request ids, or --all")
    known = {name for letter in letters for name in (letter.letter_id, letter.request_id)}
    if missing := [name for name in names if name not in known]:
        raise click.ClickException(f"no such dead letter: {', '.join(missing)}")
    return [
        letter
        for letter in letters
        if _matches(letter, model, reason) and (everything or letter.letter_id in names or letter.request_id in names)
    ]


def _matches(letter: DeadLetter, model: str | None, reason: str | None) -> bool:
    return (model is None or letter.queue == queue_name(model)) and letter.reason.startswith(reason or "")


def _summary(letter: DeadLetter) -> dict[str, Any]:
    headers = letter.headers
    return {
        **letter.summary(),
        **{name: headers[name] for name in ("enqueued_at", "tenant", "expires") if headers.get(name) is not None},
    }
