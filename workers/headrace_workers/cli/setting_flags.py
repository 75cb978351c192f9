"""`setting_flags`: a command's flags, one for each declared option, with the same name."""

from collections.abc import Callable, Iterable
from typing import Any

import click

from headrace_engine.option import Option

Command = Callable[..., Any]


def setting_flags(options: Iterable[Option]) -> Callable[[Command], Command]:
    """Return a decorator that adds the flags to a command. A flag that is not given is None: the option's default."""

    def decorate(command: Command) -> Command:
        for option in reversed(tuple(options)):
            command = _flag(option)(command)
        return command

    return decorate


def _flag(option: Option) -> Callable[[Command], Command]:
    name = f"--{option.name.replace('_', '-')}"
    shown = _shown(option.default)
    text = f"{option.help} [default: {shown}]" if shown else option.help
    if option.kind is bool:
        names = f"{name}/--no-{name[2:]}" if option.default is not False else name
        return click.option(names, is_flag=True, default=None, help=text)
    kind: Any = option.kind if option.kind in (int, float) and option.metavar != "SIZE" else str
    if option.choices and not option.metavar:
        return click.option(name, type=click.Choice(option.choices), help=text)
    return click.option(name, type=kind, metavar=option.metavar, help=text)


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return "" if default in (None, "", (), {}) else str(default)
