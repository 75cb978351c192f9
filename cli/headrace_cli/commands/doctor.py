"""`headrace doctor`: check Redis, this machine and the model before a start."""

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Final

import click

from headrace_cli.commands import options
from headrace_cli.doctor.finding import Finding
from headrace_cli.doctor.role_checks import ROLES, findings

_COLOURS: Final = {"ok": "green", "warning": "yellow", "failed": "red"}


@click.command()
@click.option(
    "--role",
    type=click.Choice(list(ROLES)),
    help="Check for this process [default: the user of the URL if it has one of these names, otherwise worker].",
)
@click.option("--model", metavar="PATH_OR_NAME", help="With the role worker: the model to serve.")
@options.redis_url
@options.as_json
def doctor(role: str | None, model: str | None, redis_url: str, as_json: bool) -> None:
    """Check whether a process of the service could work here, and say what to do.

    It checks Redis (version, memory, persistence, the rights of this user), the clock and ports; for a worker also
    the processor, the compiler, the GPU, the disk, and whether the model is whole and fits. All settings are read from
    the variables HEADRACE_*, as the process reads them. It changes nothing in Redis.

    Exit code 1 if a check failed; warnings do not count. --json prints one object, for programs.
    """
    environ = {**os.environ, "HEADRACE_REDIS_URL": redis_url, **({} if model is None else {"HEADRACE_MODEL": model})}
    found = list(findings(role, environ))
    has_failed = any(each.status == "failed" for each in found)
    if as_json:
        whole = {"version": version("headrace"), "ok": not has_failed, "findings": [asdict(each) for each in found]}
        click.echo(json.dumps(whole))
    else:
        _show(found)
    sys.exit(1 if has_failed else 0)


def _show(found: Sequence[Finding]) -> None:
    counts = Counter(each.status for each in found)
    total = f"{counts['failed']} failed, {counts['warning']} warnings, {counts['ok']} ok"
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ModuleNotFoundError:  # the base install, and the gateway's image
        for each in found:
            click.echo(f"{click.style(each.status, fg=_COLOURS[each.status])}  {each.check}: {_advice(each)}")
        click.echo(total)
        return
    table = Table("status", "check", "what was found, and what to do", show_lines=True)
    for each in found:
        table.add_row(Text(each.status, style=_COLOURS[each.status]), each.check, Text(_advice(each, "\n")))
    console = Console()
    console.print(table)
    console.print(total, highlight=False)


def _advice(finding: Finding, separator: str = " ") -> str:
    return f"{finding.text}{separator}-> {finding.remedy}" if finding.remedy else finding.text
