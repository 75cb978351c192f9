"""`headrace control`: inspect running workers, and pause, resume or drain them."""

import json
from collections.abc import Mapping
from typing import Any

import click

from headrace_broker.app import make_app
from headrace_broker.client.unavailable import unavailable
from headrace_broker.settings import BrokerSettings
from headrace_cli.commands import options
from headrace_monitoring.logging import LEVELS

_COMMANDS = {"stats": "engine_stats", "pause": "pause", "resume": "resume", "drain": "drain", "log-level": "log_level"}

ANSWER_SECONDS = 2.0


@click.command()
@click.argument("command", type=click.Choice(list(_COMMANDS)))
@click.option("--worker", "workers", multiple=True, metavar="NAME", help="Only this worker; may be repeated.")
@click.option(
    "--grace-seconds", type=click.FloatRange(min=0), metavar="S", help="With drain: requeue the rest after this time."
)
@click.option("--level", type=click.Choice(LEVELS, case_sensitive=False), help="With log-level: the new level.")
@click.option(
    "--timeout", type=float, default=ANSWER_SECONDS, show_default=True, metavar="S", help="Longest wait for answers."
)
@options.redis_url
@options.as_json
def control(
    command: str,
    workers: tuple[str, ...],
    grace_seconds: float | None,
    level: str | None,
    timeout: float,
    redis_url: str,
    as_json: bool,
) -> None:
    """Send COMMAND to all running workers, or to those named, and print their answers.

    \b
    stats      show the state of the worker and its engine
    pause      take no more requests; running ones continue
    resume     take requests again
    drain      take no more requests, and exit when the running ones have ended
    log-level  change the log level until the worker exits

    Exit code 1 if no worker answers, or if one refuses.
    """
    if grace_seconds is not None and command != "drain":
        raise click.UsageError("--grace-seconds is only for drain")
    if (level is None) is (command == "log-level"):
        raise click.UsageError("--level is only for log-level, which requires it")
    arguments = {"grace_seconds": grace_seconds, "level": level}
    tell_workers(BrokerSettings(redis_url=redis_url), command, workers, timeout, arguments, as_json=as_json)


def tell_workers(
    settings: BrokerSettings,
    command: str,
    workers: tuple[str, ...],
    timeout: float,
    arguments: Mapping[str, float | str | None],
    *,
    as_json: bool = False,
) -> None:
    """Send a command and print the answers; exit with code 1 if no worker answers, or if one refuses.

    Arguments that are None are not sent. Raises QueueUnavailableError.
    """
    with make_app(settings) as app, unavailable(settings, "ask the workers"):
        replies = app.control.broadcast(
            _COMMANDS[command],
            arguments={name: value for name, value in arguments.items() if value is not None},
            destination=list(workers) or None,
            reply=True,
            timeout=timeout,
            limit=len(workers) or None,
        )
    answers: dict[str, dict[str, Any]] = {name: answer for reply in replies for name, answer in reply.items()}
    if as_json:
        click.echo(json.dumps(answers))
    else:
        for name, answer in sorted(answers.items()):
            click.echo(f"{name}: {_sentence(answer)}")
    if not answers:
        raise click.ClickException(f"no worker answered within {timeout:g} s")
    if any("error" in answer for answer in answers.values()):
        raise SystemExit(1)


def _sentence(answer: dict[str, Any]) -> str:
    if "state" not in answer:
        return str(answer.get("ok") or answer.get("error"))
    engine = answer["engine"]
    return (
        f"{answer['state']}, {answer['requests']} requests in {answer['slots_used']} of {answer['slots']} slots"
        f" ({engine['running']} running, {engine['waiting']} waiting), KV blocks {engine['kv_blocks_used']} of"
        f" {engine['kv_blocks_total']}"
    )
