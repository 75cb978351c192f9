"""`headrace gateway`, and the commands for its files: API keys and webhook secrets."""

import asyncio
import logging
import signal
import sys
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import uvicorn

from headrace_broker.connections import connect_async
from headrace_gateway import GatewaySettings, make_app
from headrace_gateway.key_file import new_key
from headrace_gateway.redis_watch import RedisWatch
from headrace_gateway.webhooks.outbox import enable
from headrace_gateway.webhooks.secret import new_secret
from headrace_monitoring.gateway_metrics import GatewayMetrics
from headrace_monitoring.health import HealthServer
from headrace_monitoring.logging import configure_logging
from headrace_workers.cli import options
from headrace_workers.long_lived_objects import exempt_long_lived_objects

logger = logging.getLogger(__name__)

_DEFAULTS = GatewaySettings()
_PORT = click.IntRange(0, 65535)
_FILE = click.Path(path_type=Path)


def _option(name: str, description: str, **rest: Any) -> Any:
    """Return an option whose default is that of the setting of the same name. A default in `rest` comes first."""
    default = rest.pop("default", getattr(_DEFAULTS, name.strip("-").replace("-", "_"), None))
    given = {} if default is None else {"default": default}
    return options.with_variable("HEADRACE_GATEWAY", name, description, **given, **rest)


_seconds = partial(_option, metavar="S")


@click.command()
@options.redis_url
@_option("--host", "Address to listen on; --keys is required unless it is loopback.")
@_option("--port", "Port to listen on.", type=_PORT)
@_option("--keys", "File of API keys, see `headrace gateway-key` [default: none, loopback only].", type=_FILE)
@_option(
    "--webhooks",
    "File of endpoints that get webhooks when answers end, see `headrace webhook-secret` [default: none].",
    type=_FILE,
)
@_option(
    "--allow-origin",
    "Allow calls from web pages of this origin, or * for all; may be repeated.",
    multiple=True,
    metavar="ORIGIN",
)
@_option("--max-body-bytes", "Maximum size of a request's body.")
@_seconds(
    "--hold-status", "How long a stream's HTTP status is held back, so that a refusal by a worker can become a 400."
)
@_seconds("--keep-alive", "Idle time after which a stream carries a comment, for proxies.")
@_seconds("--expires", "Expiry time of requests that set none.")
@_seconds("--abandon-after", "Cancel a request if no client reads its answer for this long; 0: never.")
@_seconds("--store-life", "How long a stored response is kept in Redis after its end.")
@_seconds("--shutdown", "How long open answers may continue after SIGTERM; then clients rejoin at another replica.")
@_option(
    "--files",
    "Directory of uploads and batches, shared by all replicas [default: none, no batches].",
    type=click.Path(path_type=Path, file_okay=False),
)
@_option("--max-file-bytes", "Maximum size of an upload.")
@_option("--max-kept-bytes", "Maximum total size of one key's files.")
@_option("--batch-window", "Maximum number of batch lines in the queue.")
@_option("--batch-priority", "Best priority of a batch line; 9 is served last.", type=click.IntRange(0, 9))
@_option("--metrics-host", "Address of /metrics.", default="127.0.0.1")
@_option("--metrics-port", "Port of /metrics; 0 takes a free one [default: no metrics].", type=_PORT)
@_option("--log-level", "Minimum log level.", type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"]), default="INFO")
def gateway(
    allow_origin: tuple[str, ...], metrics_host: str, metrics_port: int | None, log_level: str, **given: Any
) -> None:
    """Serve OpenAI's API over HTTP; any number of replicas can serve one queue.

    Every option can also be set as an environment variable HEADRACE_GATEWAY_<OPTION>, and the URL as
    HEADRACE_REDIS_URL. /health and /ready need no key.

    \b
    Example:
        headrace gateway-key website >> keys.toml
        headrace gateway --keys keys.toml --host 0.0.0.0 --redis-url redis://127.0.0.1:6379/0
    """
    settings = GatewaySettings(allowed_origins=allow_origin, **given)
    configure_logging(log_level)
    metrics = GatewayMetrics(version=version("headrace"))
    watch = RedisWatch(metrics)
    server = uvicorn.Server(
        uvicorn.Config(
            make_app(settings, metrics=metrics, watch=watch),
            host=settings.host,
            port=settings.port,
            log_config=None,  # configure_logging has set it up
            access_log=False,  # the gateway logs a line of its own
            server_header=False,
            proxy_headers=False,
            http="h11",  # httptools does not limit headers: clients without a key could fill the memory
            ws="none",
            timeout_graceful_shutdown=max(1, round(settings.shutdown)),
        )
    )
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again after its shutdown
        signal.signal(number, lambda *_: None)
    with nullcontext() if metrics_port is None else _monitor(metrics, watch, metrics_host, metrics_port) as monitor:
        if monitor is not None:
            logger.info("metrics on %s/metrics", monitor.url)
        exempt_long_lived_objects()
        server.run()
    if not server.started:
        sys.exit(1)


def _monitor(metrics: GatewayMetrics, watch: RedisWatch, host: str, port: int) -> HealthServer:
    return HealthServer(
        exposition=metrics.exposition, not_ready=watch.not_ready, not_alive=watch.not_alive, host=host, port=port
    )


@click.command("gateway-key")
@click.argument("name")
@click.option("--tenant", help="Tenant of the requests [default: none].")
def gateway_key(name: str, tenant: str | None) -> None:
    """Make an API key: print its entry for the key file to stdout, and the key itself, once, to stderr.

    \b
    Example:
        headrace gateway-key website --tenant acme >> keys.toml
    """
    key, entry = new_key(name, tenant=tenant)
    click.echo(f"The key, shown only once: {key}", err=True)
    click.echo(entry)


@click.command("webhook-secret")
def webhook_secret() -> None:
    """Make a secret that signs the webhooks of an endpoint. The webhook file and the receiver need it."""
    click.echo(new_secret())


@click.command("webhook-enable")
@click.argument("name")
@options.redis_url
def webhook_enable(name: str, redis_url: str) -> None:
    """Send webhooks to the endpoint NAME again, after its receiver answered 410.

    Waiting webhooks that are younger than four days are delivered.
    """
    if not asyncio.run(_enable(redis_url, name)):
        raise click.ClickException(f"no endpoint {name!r} is disabled")
    click.echo(f"{name} is enabled")


async def _enable(redis_url: str, name: str) -> bool:
    async with connect_async(redis_url) as client:
        return await enable(client, name)
