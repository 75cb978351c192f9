"""`headrace generate`, `status` and `cancel`: the queue's client on the command line. Needs no torch."""

import json
import sys
from dataclasses import asdict
from typing import Any

import click

from headrace_broker.client.client import Client
from headrace_broker.results import RequestFailedError
from headrace_broker.streams.events import ChunkEvent, EndEvent
from headrace_cli.commands import options


@click.command()
@click.argument("prompt")
@click.option("--model", metavar="NAME", help="Served name [default: the only one that is registered].")
@click.option("--lora", metavar="NAME", help="Name of a LoRA adapter that the workers serve.")
@click.option("--chat", is_flag=True, help="Send the prompt as a user message, through the model's chat template.")
@click.option("--system", metavar="TEXT", help="With --chat: a system message before the prompt.")
@click.option("--max-tokens", type=int, default=256, show_default=True, help="Maximum number of new tokens.")
@click.option("--temperature", type=float, help="Sampling temperature; 0 takes the most likely token [default: 1].")
@click.option("--top-p", type=float, help="Sample from the most likely tokens up to this total probability.")
@click.option("--seed", type=int, help="Random seed; the same seed gives the same answer.")
@click.option("--stop", multiple=True, metavar="TEXT", help="Stop before this text; may be repeated.")
@click.option("--priority", type=click.IntRange(0, 9), default=0, show_default=True, help="0 is served first.")
@click.option("--timeout", type=float, default=300.0, show_default=True, metavar="S", help="Longest wait for output.")
@options.redis_url
@options.as_json
def generate(
    prompt: str,
    model: str | None,
    lora: str | None,
    chat: bool,
    system: str | None,
    priority: int,
    timeout: float,
    redis_url: str,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Send PROMPT to the service and print the answer while it is generated. `-` reads the prompt from stdin.

    Ctrl-C cancels the request. Exit code 1 if the request fails.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    params = {
        name: list(value) if name == "stop" else value for name, value in sampling.items() if value not in (None, ())
    }
    with Client(options.broker_settings(redis_url)) as client:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": text})
        request_id = client.submit(
            None if chat else text,
            params,
            messages=messages if chat else None,
            model=model or _only_model(client),
            lora=lora,
            priority=priority,
        )
        try:
            if as_json:
                click.echo(json.dumps(client.result(request_id, timeout=timeout).to_wire()))
            else:
                _print_stream(client, request_id, timeout)
        except KeyboardInterrupt:
            client.cancel(request_id)
            click.echo(f"\nrequest {request_id} cancelled", err=True)
            sys.exit(130)


@click.command()
@click.argument("request_id")
@options.redis_url
@options.as_json
def status(request_id: str, redis_url: str, as_json: bool) -> None:
    """Print the state of the request REQUEST_ID: pending (queued or unknown), running, or finished and why."""
    with Client(options.broker_settings(redis_url)) as client:
        found = client.status(request_id)
    if as_json:
        click.echo(json.dumps(asdict(found)))
    elif found.state == "pending":
        click.echo("pending: no worker has started it, or its id is unknown or expired")
    else:
        how = f" ({found.finish_reason})" if found.finish_reason else ""
        done = f"{found.rows} rows" if found.rows else f"{found.tokens} tokens"
        click.echo(f"{found.state}{how}: {done}, attempt {found.attempt}")


@click.command()
@click.argument("request_id")
@options.redis_url
@options.as_json
def cancel(request_id: str, redis_url: str, as_json: bool) -> None:
    """Cancel the request REQUEST_ID: a queued one never runs, a running one stops at its next chunk.

    Exit code 1 if the request has already ended, or if its id is unknown. An id is unknown if there is no stream, no
    result and no message with it in the queue of a registered model.
    """
    with Client(options.broker_settings(redis_url)) as client:
        is_known = client.is_known(request_id)
        cancelled = is_known is not False and client.cancel(request_id)
    if as_json:
        click.echo(json.dumps({"request_id": request_id, "cancelled": cancelled, "known": is_known}))
    elif is_known is False:
        click.echo(f"request {request_id} is unknown: it is in no queue, and has no stream and no result", err=True)
    else:
        click.echo("cancelled" if cancelled else "the request has already ended")
    sys.exit(0 if cancelled else 1)


def _only_model(client: Client) -> str:
    known = sorted(client.models())
    if len(known) == 1:
        return known[0]
    if not known:
        raise click.UsageError("no worker has served a model here yet: start one, or name the queue with --model")
    raise click.UsageError(f"several models are registered, choose one with --model: {', '.join(known)}")


def _print_stream(client: Client, request_id: str, timeout: float) -> None:
    end: EndEvent | None = None
    for event in client.events(request_id, timeout=timeout):
        if isinstance(event, ChunkEvent):
            click.echo(event.text, nl=False)
        elif isinstance(event, EndEvent):
            end = event
    click.echo()
    if end is None:
        return
    if end.error is not None:
        raise RequestFailedError(request_id, end.error.code, end.error.message)
    if end.usage is not None:
        usage = f"{end.usage.prompt_tokens} prompt tokens, {end.usage.completion_tokens} generated"
        click.echo(f"[{end.finish_reason}] {usage}, request {request_id}", err=True)
