"""`headrace gateway`, and the commands for its files: API keys and webhook secrets."""

import asyncio
import logging
import os
import signal
import sys
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version
from typing import Any, cast

import click
import uvicorn

from headrace_cli.commands import options
from headrace_cli.commands.options import given, setting_flags
from headrace_gateway import GatewaySettings, make_app
from headrace_gateway.http.protocol import HttpProtocol
from headrace_gateway.keys.key_file import new_key
from headrace_gateway.redis.watch import RedisWatch
from headrace_gateway.webhooks.secret import new_secret
from headrace_monitoring.gateway_metrics import GatewayMetrics
from headrace_monitoring.health import HealthServer
from headrace_monitoring.logging import configure_logging
from headrace_wire.option import options_of
from headrace_workers.long_lived_objects import exempt_long_lived_objects

logger = logging.getLogger(__name__)

_CUT_BY_SHUTDOWN = ("Cancel %s running task(s)", "ASGI callable returned without completing response")


@click.command()
@options.redis_url
@setting_flags(options_of(GatewaySettings))
def gateway(redis_url: str, **flags: Any) -> None:
    """Serve OpenAI's API over HTTP; any number of replicas can serve one queue.

    Every option can also be set as an environment variable HEADRACE_GATEWAY_<OPTION>, and the URL as
    HEADRACE_REDIS_URL. /health and /ready need no key.

    \b
    Example:
        headrace gateway-key website >> keys.toml
        headrace gateway --keys keys.toml --host 0.0.0.0 --redis-url redis://127.0.0.1:6379/0
    """
    settings = GatewaySettings.from_env(os.environ, redis_url=redis_url, **given(flags))
    configure_logging(settings.log_level)
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
            http=_protocol(settings),
            ws="none",
            timeout_graceful_shutdown=max(1, round(settings.shutdown)),
        )
    )
    logging.getLogger("uvicorn.error").addFilter(lambda record: _as_expected(record, is_ending=server.should_exit))
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again after its shutdown
        signal.signal(number, lambda *_: None)
    with nullcontext() if settings.metrics_port is None else _monitor(metrics, watch, settings) as monitor:
        if monitor is not None:
            logger.info("metrics on %s/metrics", monitor.url)
        exempt_long_lived_objects()
        server.run()
    if not server.started:
        sys.exit(1)


def _as_expected(record: logging.LogRecord, *, is_ending: bool) -> bool:
    """Log uvicorn's errors about answers that the shutdown has cut as INFO. Return True, so that no record is lost."""
    if is_ending and str(record.msg).startswith(_CUT_BY_SHUTDOWN):
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True


def _protocol(settings: GatewaySettings) -> type[asyncio.Protocol]:
    """Return the factory that uvicorn calls for each connection."""
    make = partial(HttpProtocol, head_timeout=settings.head_timeout, body_timeout=settings.body_timeout)
    return cast("type[asyncio.Protocol]", make)


def _monitor(metrics: GatewayMetrics, watch: RedisWatch, settings: GatewaySettings) -> HealthServer:
    return HealthServer(
        exposition=metrics.exposition,
        not_ready=watch.not_ready,
        not_alive=watch.not_alive,
        host=settings.metrics_host,
        port=settings.metrics_port or 0,
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
