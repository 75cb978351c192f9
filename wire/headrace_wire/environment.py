"""Read declared options from environment variables `HEADRACE_*`, and parse each text into a value of its type."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, get_origin

from headrace_wire.option import Option

_SWITCHES: Final = dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True) | dict.fromkeys(
    ("false", "f", "no", "n", "off", "0"), False
)
_SIZE: Final = re.compile(r"\s*(\d*\.?\d+)\s*([kmgtpe]?)(i?)b?\s*", re.IGNORECASE)


def variable_of(option: Option, prefix: str = "HEADRACE") -> str:
    return f"{prefix}_{option.name.upper()}"


def read(
    options: Iterable[Option], environ: Mapping[str, str], prefix: str = "HEADRACE"
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the variables that are set and not empty, and one sentence for each invalid one."""
    values: dict[str, Any] = {}
    problems = []
    for option in options:
        variable = variable_of(option, prefix)
        text = environ.get(variable, "").strip()
        if not text:
            continue
        parse, expected = _form_of(option)
        try:
            value = parse(text)
        except (ValueError, KeyError, RecursionError):
            problems.append(f"{variable} {expected}, got {text!r}")
            continue
        if option.allows(value):
            values[option.name] = value
        else:
            problems.append(f"{variable} {option.limits}, got {text!r}")
    return values, problems


def names(text: str) -> list[str]:
    """Split a text at its commas; leave out empty parts."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _form_of(option: Option) -> tuple[Callable[[str], object], str]:
    """Return the function that parses the option's text, and the error for a text that it cannot parse."""
    if option.metavar in _FORMS:
        return _FORMS[option.metavar]
    if option.kind is bool:
        return (lambda text: _SWITCHES[text.strip().lower()]), "must be true or false"
    if option.kind in (int, float):
        return option.kind, str(option.limits)
    if get_origin(option.kind) is tuple:
        return (lambda text: tuple(text.split())), ""
    return (Path if option.kind is Path else str), ""


def _map(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


def _size(text: str) -> int:
    """Return a number of bytes. 1kB is 1000 and 1KiB is 1024."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(text)
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kmgtpe".index(prefix.lower() or " "))


_FORMS: Final[dict[str, tuple[Callable[[str], object], str]]] = {
    "JSON": (_map, "must be a JSON object"),
    "N,N": (lambda text: [int(part) for part in text.split(",")], "must be integers separated by commas"),
    "PATHS": (names, ""),
    "SIZE": (_size, "must be a number of bytes, or a number with a unit such as 4GiB"),
}
"""Parser and error, by the metavar of an option."""
