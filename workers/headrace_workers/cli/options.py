"""Options that several commands share."""

from collections.abc import Callable
from typing import Any

import click

redis_url: Callable[..., Any] = click.option(
    "--redis-url",
    envvar="HEADRACE_REDIS_URL",
    default="redis://127.0.0.1:6379/0",
    show_default=True,
    metavar="URL",
    help="The service's Redis: redis://, rediss://, unix:// or sentinel://.",
)
as_json: Callable[..., Any] = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


def with_variable(prefix: str, name: str, description: str, **rest: Any) -> Callable[..., Any]:
    """Return an option that can also be set as the environment variable PREFIX_NAME."""
    envvar = f"{prefix}_{name.strip('-').replace('-', '_').upper()}"
    return click.option(name, envvar=envvar, show_default="default" in rest, help=description, **rest)
