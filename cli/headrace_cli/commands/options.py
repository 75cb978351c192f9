"""Flags of commands: flags that several commands share, and flags that are made from declared options."""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_origin

import click

from headrace_broker.settings import BrokerSettings
from headrace_wire.environment import variable_of
from headrace_wire.option import Option, options_of

_URL, *_OTHER_URLS = (
    next(option for option in options_of(BrokerSettings) if option.name == name)
    for name in ("redis_url", "queue_urls", "stream_urls")
)

redis_url: Callable[..., Any] = click.option(
    "--redis-url",
    envvar=variable_of(_URL),
    default=_URL.default,
    show_default=True,
    metavar=_URL.metavar,
    help=_URL.help,
)
as_json: Callable[..., Any] = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


def broker_settings(redis_url: str) -> BrokerSettings:
    """Return the servers of a command: that of its flag, and those of HEADRACE_QUEUE_URLS and HEADRACE_STREAM_URLS.

    Raises SettingsError.
    """
    queue_urls, stream_urls = (os.environ.get(variable_of(option), "") for option in _OTHER_URLS)
    return BrokerSettings(redis_url=redis_url, queue_urls=queue_urls, stream_urls=stream_urls)


Command = Callable[..., Any]


def setting_flags(options: Iterable[Option]) -> Callable[[Command], Command]:
    """Return a decorator that adds the flags to a command. `given` leaves out those that are not given."""

    def decorate(command: Command) -> Command:
        for option in reversed(tuple(options)):
            command = _flag(option)(command)
        return command

    return decorate


def given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that the user gave. The others have the option's default, or its variable's value."""
    return {name: value for name, value in flags.items() if value not in (None, ())}


def _flag(option: Option) -> Callable[[Command], Command]:
    name = f"--{option.name.replace('_', '-')}"
    shown = _shown(option.default)
    text = f"{option.help} [default: {shown}]" if shown else option.help
    if option.kind is bool:
        names = f"{name}/--no-{name[2:]}" if option.default is not False else name
        return click.option(names, is_flag=True, default=None, help=text)
    if option.choices and not option.metavar:
        return click.option(name, type=click.Choice(option.choices), help=text)
    return click.option(
        name, type=_type(option), metavar=option.metavar, multiple=get_origin(option.kind) is tuple, help=text
    )


def _type(option: Option) -> Any:
    if option.kind is Path:
        return click.Path(path_type=Path)
    return option.kind if option.kind in (int, float) and option.metavar != "SIZE" else str


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return "" if default in (None, "", (), {}) else str(default)
