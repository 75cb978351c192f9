"""`headrace gateway`: OpenAI's API over HTTP on the queue."""

from typing import Any

import click

from headrace_gateway import GatewaySettings, make_app


@click.command()
@click.option("--redis-url", envvar="HEADRACE_REDIS_URL", metavar="URL", help="The queue's server.")
@click.option("--host", envvar="HEADRACE_GATEWAY_HOST", help="Address to listen on [default: 127.0.0.1].")
@click.option("--port", envvar="HEADRACE_GATEWAY_PORT", type=int, help="Port to listen on [default: 8000].")
def gateway(**options: Any) -> None:
    """Serve OpenAI's API over HTTP; any number of replicas."""
    import uvicorn

    settings = GatewaySettings(**{name: value for name, value in options.items() if value is not None})
    uvicorn.run(
        make_app(settings),
        host=settings.host,
        port=settings.port,
        timeout_graceful_shutdown=int(settings.shutdown),
        log_level="warning",
    )
