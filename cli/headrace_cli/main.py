"""The command group. It prints an error as one sentence, without a traceback: exit code 1 (2 for wrong usage)."""

import sys
from importlib import import_module
from importlib.metadata import version

import click

_COMMANDS = {
    "demo": ("headrace_cli.commands.demo", "demo", "Show eight live streams from a real model through a real queue."),
    "serve": ("headrace_cli.commands.serve", "serve", "Serve a model over HTTP: a queue, a worker and a gateway."),
    "worker": ("headrace_cli.commands.worker", "worker", "Serve a model: take requests from the queue."),
    "gateway": ("headrace_cli.commands.gateway", "gateway", "Serve OpenAI's API over HTTP, through the queue."),
    "gateway-key": ("headrace_cli.commands.gateway", "gateway_key", "Make an API key for the gateway."),
    "webhook-secret": ("headrace_cli.commands.gateway", "webhook_secret", "Make a secret that signs webhooks."),
    "exporter": ("headrace_cli.commands.exporter", "exporter", "Serve metrics of the queues and Redis."),
    "doctor": ("headrace_cli.commands.doctor", "doctor", "Check Redis, this machine and the model."),
    "top": ("headrace_cli.commands.top", "top", "Show queues and workers live in the terminal."),
    "generate": ("headrace_cli.commands.client", "generate", "Send one request and stream its answer."),
    "batch": ("headrace_cli.commands.batch", "batch", "Run a file of requests, without a gateway."),
    "status": ("headrace_cli.commands.client", "status", "Print the state of a request."),
    "cancel": ("headrace_cli.commands.client", "cancel", "Cancel a request, queued or running."),
    "control": ("headrace_cli.commands.control", "control", "Inspect running workers; pause, resume or drain them."),
    "queue": ("headrace_cli.commands.queue", "queue", "List the queues, or delete the waiting requests of one."),
    "usage": ("headrace_cli.commands.usage", "usage", "Print the tokens that tenants, keys and models have used."),
    "erase": ("headrace_cli.commands.erase", "erase", "Remove what is stored of a tenant."),
    "streams": ("headrace_cli.commands.streams", "streams", "List or change the servers that have the streams."),
    "dead-letters": ("headrace_cli.commands.dead", "dead_letters", "List, inspect, requeue or delete dead letters."),
    "model": ("headrace_cli.commands.model", "model", "Fetch the default model into the cache and print its folder."),
}

_OF_GATEWAY = tuple(f"headrace_cli.commands.{name}" for name in ("gateway", "batch", "erase"))


def _needs(module: str | None) -> str:
    extra = "gateway" if module in _OF_GATEWAY else "worker"
    return f"needs the extra headrace[{extra}]: pip install 'headrace[{extra}]'"


class _Group(click.Group):
    """Loads a command's module only when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        module, name, _ = _COMMANDS[cmd_name]
        try:
            command: click.Command = getattr(import_module(module), name)
        except ModuleNotFoundError as error:
            raise click.ClickException(
                f"`headrace {cmd_name}` {_needs(module)} (module {error.name} is missing)"
            ) from error
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in _COMMANDS.items()])


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("headrace"), prog_name="headrace")
def _headrace() -> None:
    """Message-queue-driven LLM inference: Celery and Redis in front of a continuous-batching engine.

    Start with `headrace demo`. A service consists of a Redis server, one or more workers (`headrace worker`), and
    clients that send Celery tasks, such as `headrace generate`.
    """


def main() -> None:
    """Entry point of the console script."""
    from headrace_broker.errors import HeadraceBrokerError
    from headrace_cli.errors import HeadraceCommandError
    from headrace_monitoring.errors import HeadraceMonitoringError
    from headrace_workers.errors import HeadraceWorkerError

    try:
        _headrace()
    except (HeadraceBrokerError, HeadraceCommandError, HeadraceMonitoringError, HeadraceWorkerError) as error:
        sys.exit(f"headrace: {error}")
    except ModuleNotFoundError as error:
        if str(error.name).startswith("headrace"):
            raise
        sys.exit(f"headrace: this command {_needs(None)} (module {error.name} is missing)")
    except Exception as error:
        # These packages cannot be imported here: they may not be installed in full.
        if type(error).__module__ not in ("headrace_engine.errors", "headrace_gateway.errors"):
            raise
        sys.exit(f"headrace: {error}")
