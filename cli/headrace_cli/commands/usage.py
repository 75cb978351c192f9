"""`headrace usage`: the tokens that were used, by day, tenant, key and model."""

import json
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

from headrace_broker.client.client import Client
from headrace_broker.usage.ledger import DAY, UsageCounts, Usages
from headrace_cli.commands import options

_DATE: Final = click.DateTime(["%Y-%m-%d"])
_DAYS_SHOWN: Final = 30
_MOST_DAYS: Final = 400


@click.command()
@click.option("--from", "first", type=_DATE, help=f"First day, in UTC. [default: {_DAYS_SHOWN - 1} days ago]")
@click.option("--to", "last", type=_DATE, help="Last day, in UTC. [default: today]")
@click.option("--tenant", metavar="NAME", help="Only this tenant.")
@options.redis_url
@options.as_json
def usage(first: datetime | None, last: datetime | None, tenant: str | None, redis_url: str, as_json: bool) -> None:
    """Print the requests that ended and their tokens, by day, tenant, API key, model and endpoint.

    A request counts on the day on which it ended, in UTC by Redis's clock. `--json` also has the sums of each priority
    step.
    """
    last = last or datetime.now(UTC)
    first = first or last - timedelta(days=_DAYS_SHOWN - 1)
    start, end = (int(day.replace(tzinfo=UTC).timestamp()) // DAY * DAY for day in (first, last))
    if start > end:
        raise click.UsageError(f"--from must not be after --to, got {_day(start)} and {_day(end)}")
    if end - start >= _MOST_DAYS * DAY:
        raise click.UsageError(f"--from and --to must span {_MOST_DAYS} days at most, got {(end - start) // DAY + 1}")
    with Client(options.broker_settings(redis_url)) as client:
        found = client.usage(DAY, start, end + DAY)
    rows = [row for row in usage_rows(found) if tenant is None or row["tenant"] == tenant]
    if as_json:
        click.echo(json.dumps(rows))
        return
    table = Table("day", "tenant", "key", "model", "endpoint", "requests", "prompt", "cached", "completion", "seconds")
    for row in rows:
        names = (row["day"], row["tenant"] or "-", row["key"] or "-", row["model"], row["endpoint"])
        counts = (row[name] for name in ("requests", "prompt_tokens", "cached_tokens", "completion_tokens"))
        table.add_row(*names, *map(str, counts), f"{row['seconds']:.0f}")
    Console().print(table)


def usage_rows(found: Usages) -> list[dict[str, Any]]:
    """Return a JSON object for each day, tenant, key, model and endpoint, with the sums of its priority steps."""
    steps: dict[tuple[int, str, str, str, str], dict[int, UsageCounts]] = defaultdict(dict)
    for group, counts in found.items():
        steps[group.start, group.tenant, group.key_name, group.model, group.kind][group.step] = counts
    rows = []
    for (start, tenant, key, model, kind), by_step in sorted(steps.items()):
        names = {"day": _day(start), "tenant": tenant, "key": key, "model": model, "endpoint": kind}
        total = UsageCounts()
        for counts in by_step.values():
            total = total.plus(counts)
        by_priority = {str(step): _sums(counts) for step, counts in sorted(by_step.items())}
        rows.append({**names, **_sums(total), "by_priority": by_priority})
    return rows


def _sums(counts: UsageCounts) -> dict[str, Any]:
    names = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "attempts")
    return {**{name: getattr(counts, name) for name in names}, "seconds": counts.milliseconds / 1000}


def _day(start: int) -> str:
    return datetime.fromtimestamp(start, UTC).date().isoformat()
