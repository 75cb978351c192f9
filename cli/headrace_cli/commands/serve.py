"""`headrace serve`: start the whole service with one command."""

import json
import shlex
import signal
import sys
from pathlib import Path

import click

from headrace_broker import Client
from headrace_broker.models.registry import RegisteredModel
from headrace_cli.local.service import LocalService, RunningService, check_free
from headrace_engine.checkpoints import default_model
from headrace_gateway import GatewaySettings


@click.command()
@click.option("--model", metavar="PATH_OR_NAME", default=default_model.NAME, show_default=True, help="Model to serve.")
@click.option("--redis-url", envvar="HEADRACE_REDIS_URL", metavar="URL", help="A running Redis [default: start one].")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the gateway.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="Port of the gateway.")
@click.option("--keys", type=click.Path(exists=True, dir_okay=False), help="API key file; not needed on loopback.")
@click.option(
    "--files", type=click.Path(file_okay=False, path_type=Path), help="Folder for uploads and batches [default: none]."
)
def serve(model: str, redis_url: str | None, host: str, port: int, keys: str | None, files: Path | None) -> None:
    """Serve a model over HTTP with OpenAI's API: a queue, a worker and a gateway, until Ctrl-C.

    Needs no Redis, no GPU and no configuration. When it exits, it ends everything that it started.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that SIGTERM, too, ends everything
    # refuse bad settings before anything is fetched or started
    GatewaySettings(host=host, port=port, keys=None if keys is None else Path(keys))
    check_free(host, port)
    try:
        if model == default_model.NAME:
            model = str(default_model.fetch(progress=_progress))
        service = LocalService(model, _progress, redis_url=redis_url, host=host, port=port, keys=keys, files=files)
        with service.running() as running:
            _introduce(running, has_keys=keys is not None)
            running.watch()
    except KeyboardInterrupt:
        _progress("stopped")


def _introduce(running: RunningService, *, has_keys: bool) -> None:
    with Client(running.redis_url) as client:
        model = client.models()[running.model]
    path, body = _example(model)
    key = " -H 'Authorization: Bearer YOUR_KEY'" if has_keys else ""
    # one line each, so that they can be pasted
    click.echo(f"\nOpenAI's API: {running.url}/v1")
    click.echo(
        f"Try it: curl -N {running.url}/v1/{path}{key} -H 'Content-Type: application/json'"
        f" -d {shlex.quote(json.dumps({'model': running.model, **body}))}"
    )
    if path == "completions":
        click.echo("The model has no chat template: it completes texts, and chats are refused.")
    click.echo(f"Web page: {running.url}/")
    click.echo("Press Ctrl-C to stop.")


def _example(model: RegisteredModel) -> tuple[str, dict[str, object]]:
    """Return the path of an API that the model serves, and a body for it without the model."""
    if "embed" in model.tasks:
        return "embeddings", {"input": ["Hello!"]}
    if "score" in model.tasks:
        return "rerank", {"query": "Where does the mill stand?", "documents": ["By the river.", "A wheel turns."]}
    if "classify" in model.tasks:
        return "classify", {"input": ["Hello!"]}
    generated: dict[str, object] = {"max_tokens": 64, "stream": True}
    if model.template.exists:
        return "chat/completions", {"messages": [{"role": "user", "content": "Hello!"}], **generated}
    return "completions", {"prompt": "Once upon a time", **generated}


def _progress(line: str) -> None:
    click.echo(click.style(line, dim=True), err=True)
