"""The command `headrace`. Each subcommand's module imports only what it needs, so that clients need no torch."""

from headrace_workers.cli.main import main

__all__ = ["main"]
