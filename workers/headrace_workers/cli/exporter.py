"""`headrace exporter`: serve Prometheus metrics of the queues and Redis, even while no worker runs."""

import signal
from functools import partial

import click

from headrace_broker.connections import connect
from headrace_broker.settings import BrokerSettings
from headrace_monitoring.logging import configure_logging
from headrace_workers.cli import options
from headrace_workers.exporter import Exporter

_option = partial(options.with_variable, "HEADRACE_EXPORTER")


@click.command()
@options.redis_url
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME",
    help="Export this model's queue before a worker has registered the model; may be repeated.",
)
@_option("--host", "Listen address.", default="127.0.0.1")
@_option("--port", "Listen port; 0 takes a free one.", type=click.IntRange(0, 65535), default=9465)
@_option("--interval", "Pause between two polls of Redis.", type=click.FloatRange(0.1, 60.0), default=2.0, metavar="S")
def exporter(redis_url: str, models: tuple[str, ...], host: str, port: int, interval: float) -> None:
    """Serve metrics of all queues and of Redis on /metrics, and /health/ready and /health/live.

    It needs only read access to Redis, and no worker, so an autoscaler can scale workers from zero by its metrics.
    """
    configure_logging()
    settings = BrokerSettings(redis_url=redis_url)
    with connect(settings.redis_url) as client:
        running = Exporter(client, models=models, interval_seconds=interval, host=host, port=port)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: running.stop())
        running.run()
