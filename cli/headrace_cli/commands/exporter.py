"""`headrace exporter`: serve Prometheus metrics of the queues and Redis, even while no worker runs."""

import os
import signal
from typing import Any

import click

from headrace_broker.server.connections import connect
from headrace_broker.server.queue_servers import QueueServers
from headrace_broker.server.stream_servers import StreamServers
from headrace_cli.commands import options
from headrace_cli.commands.options import given, setting_flags
from headrace_cli.exporter import Exporter, ExporterSettings
from headrace_cli.stream_server_sampler import STREAM_SERVER_TIMEOUT
from headrace_monitoring.logging import configure_logging
from headrace_wire.option import options_of


@click.command()
@options.redis_url
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME",
    help="Export this model's queue before a worker has registered the model; may be repeated.",
)
@setting_flags(options_of(ExporterSettings))
def exporter(redis_url: str, models: tuple[str, ...], **flags: Any) -> None:
    """Serve metrics of all queues and of Redis on /metrics, and /health/ready and /health/live.

    It needs only read access to Redis, and no worker, so an autoscaler can scale workers from zero by its metrics.
    """
    settings = ExporterSettings.from_env(os.environ, **given(flags))
    configure_logging()
    broker = options.broker_settings(redis_url)
    with (
        connect(broker.redis_url) as client,
        QueueServers(client, broker.url_by_queue) as servers,
        StreamServers.connected(client, *broker.stream_servers, timeout=STREAM_SERVER_TIMEOUT) as streams,
    ):
        running = Exporter(
            client,
            models=models,
            interval_seconds=settings.interval,
            host=settings.host,
            port=settings.port,
            servers=servers,
            streams=streams,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: running.stop())
        running.run()
