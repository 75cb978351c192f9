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
