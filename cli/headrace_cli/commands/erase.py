"""`headrace erase`: remove what is stored of a tenant."""

import json
from pathlib import Path

import click

from headrace_broker.client.client import Client
from headrace_broker.client.unavailable import unavailable
from headrace_cli.commands import options
from headrace_cli.erase.eraser import Eraser
from headrace_cli.erase.servers import Servers
from headrace_gateway.keys.key_file import read_keys
from headrace_wire.request import name_problems


@click.command()
@click.option("--tenant", required=True, metavar="NAME", help="The tenant.")
@click.option(
    "--files",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    envvar="HEADRACE_GATEWAY_FILES",
    help="The gateway's directory of uploads and batches.",
)
@click.option(
    "--keys",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    envvar="HEADRACE_GATEWAY_KEYS",
    help="The gateway's file of API keys: it names keys that have only files, and keys of other tenants.",
)
@click.option("--key", "names", multiple=True, metavar="NAME", help="A key of the tenant that --keys does not name.")
@click.option("--cancel", is_flag=True, help="Cancel the tenant's open requests and batches first.")
@click.option("--wait", default=60.0, show_default=True, metavar="S", help="With --cancel: how long to wait for them.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@options.redis_url
@options.as_json
def erase(
    tenant: str,
    files: Path | None,
    keys: Path | None,
    names: tuple[str, ...],
    cancel: bool,
    wait: float,
    yes: bool,
    redis_url: str,
    as_json: bool,
) -> None:
    """Permanently remove what Redis and the gateway's directory of files have of a tenant, and scan them again.

    Streams, results, responses, files, batches, dead letters, idempotency keys and names are removed. The ledger keeps
    the sums under the name (erased). Exit code 1 if requests of the tenant are open, or if the second scan finds
    anything. Remove the tenant's API keys first, so that no new requests arrive.
    """
    if problems := name_problems("tenant", tenant):
        raise click.UsageError("; ".join(problems))
    owners = {key.name: key.tenant for _, key in read_keys(keys)} if keys else {}
    own = {*names, *(name for name, owner in owners.items() if owner == tenant)}
    foreign = {name for name, owner in owners.items() if owner != tenant} if keys else None
    settings = options.broker_settings(redis_url)
    with (
        unavailable(settings, "erase a tenant"),
        Client(settings) as client,
        Servers.connected(settings) as servers,
    ):
        eraser = Eraser(servers, client, tenant, files, own, foreign)
        found = eraser.find()
        if cancel:
            found = eraser.cancel(found, wait)
        if found.is_open:
            what = f"{len(found.open_requests)} request(s) and {len(found.open_batches)} batch(es) of {tenant} are open"
            hint = (
                f"they have not ended within {wait:g} s: is a worker running?" if cancel else "give --cancel, or wait"
            )
            raise click.ClickException(f"{what}, and nothing was removed: {hint}")
        if not yes:
            count = len(found.traces) + len(found.rows)
            click.confirm(f"Remove {count} keys and entries of {tenant}, and its files?", abort=True, err=True)
        erasure = eraser.erase(found)
    removed = {kind: count for kind, count in sorted(erasure.removed.items()) if count}
    if as_json:
        told = {"tenant": tenant, "removed": removed, "left": erasure.left, "files_searched": files is not None}
        click.echo(json.dumps(told))
    else:
        for kind, count in removed.items():
            click.echo(f"{count} {kind} removed")
    if erasure.left:
        raise click.ClickException(f"the scan found {len(erasure.left)} more: {', '.join(erasure.left[:5])}")
    if not as_json:
        click.echo(f"nothing of {tenant} is left in {len(servers.all)} server(s)")
        if files is None:
            click.echo("files were not searched: give --files", err=True)
