"""The command `headrace`. Each command's module imports what it needs, so that clients need no torch."""

from headrace_workers.cli.main import main

__all__ = ["main"]
