"""`option`: declares one option or setting as a field of a dataclass: its type, default, meaning and limits.

`options_of` reads the declarations. Checks, environment variables, command line flags and the reference use them.
"""

import math
from dataclasses import MISSING, dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, Final, TypeVar, cast, get_args

T = TypeVar("T")

_CANNOT: Final = "is set, which device {device} cannot do"


def option(
    default: T,
    help: str,  # noqa: A002  # as argparse and click call it
    *,
    metavar: str = "",
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: tuple[str | None, ...] = (),
    devices: tuple[str, ...] = (),
    elsewhere: str = _CANNOT,
    none_is_default: bool = False,
    repr: bool = True,  # noqa: A002  # as dataclasses call it
) -> T:
    """Declare an option in the body of a dataclass. The annotation is its type.

    Args:
        help: what the option means. In this text, `None:` stands for an option that is not set.
        metavar: the form of its value in text: N, NAME, JSON, `N,N` and so on.
        least, most, above, below: limits of a number. `above` and `below` are not allowed values themselves.
        choices: the values that Headrace's own engine knows. Another engine has its own.
        devices: the devices on which Headrace's own engine supports other values than the default. Empty: all.
        elsewhere: the end of the error for a value that is set on another device.
        none_is_default: whether None means the default, as it may in vLLM.
        repr: whether the value is in the repr of its object. A secret must not be.
    """
    declared = {
        "help": help,
        "metavar": metavar,
        "least": least,
        "most": most,
        "above": above,
        "below": below,
        "choices": choices,
        "devices": devices,
        "elsewhere": elsewhere,
        "none_is_default": none_is_default,
    }
    made: Any
    if isinstance(default, dict):
        made = field(default_factory=default.copy, repr=repr, metadata=declared)
    else:
        made = field(default=default, repr=repr, metadata=declared)
    return cast(T, made)


def changed(kind: type, name: str, default: T, more_help: str = "") -> T:
    """Declare an option of the base class `kind` again, with another default. `more_help` is appended to its help."""
    (declared,) = [found.metadata for found in fields(kind) if found.name == name]
    return field(default=default, metadata={**declared, "help": f"{declared['help']} {more_help}".rstrip()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A declared option. See `option` for what its attributes mean."""

    name: str
    type: Any
    """The annotation: a type, or a union of one with None."""
    default: object
    help: str
    metavar: str
    least: float | None
    most: float | None
    above: float | None
    below: float | None
    choices: tuple[str | None, ...]
    devices: tuple[str, ...]
    elsewhere: str
    none_is_default: bool

    @property
    def kind(self) -> Any:
        """The type without None."""
        if not isinstance(self.type, UnionType):
            return self.type
        (kind,) = [part for part in get_args(self.type) if part is not NoneType]
        return kind

    @property
    def takes_none(self) -> bool:
        return NoneType in get_args(self.type)

    @property
    def limits(self) -> str | None:
        """The end of the error for a refused number: `must be an integer of at least 1`. None: all are allowed."""
        bounds = [
            f"{words} {bound}"
            for words, bound in (
                ("of at least", self.least),
                ("above", self.above),
                ("at most", self.most),
                ("below", self.below),
            )
            if bound is not None
        ]
        return f"must be {'an integer' if self.kind is int else 'a number'} {' and '.join(bounds)}" if bounds else None

    def allows(self, value: object) -> bool:
        """Whether a value is a number within the limits. True if the option has no limits."""
        if self.limits is None or (value is None and self.takes_none):
            return True
        # True is an instance of int
        if isinstance(value, bool) or not isinstance(value, int if self.kind is int else int | float):
            return False
        if isinstance(value, float) and not math.isfinite(value):
            return False
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )


def options_of(kind: type) -> tuple[Option, ...]:
    """Return the options that the fields of a dataclass declare, in their order."""
    return tuple(
        Option(
            name=found.name,
            type=found.type,
            default=found.default if found.default_factory is MISSING else found.default_factory(),
            **found.metadata,
        )
        for found in fields(kind)
        if "help" in found.metadata
    )


def problems_of(settings: Any) -> list[str]:
    """Return a sentence for each option in `settings` whose value is beyond its limits."""
    return [
        f"{found.name} {found.limits}, got {getattr(settings, found.name)!r}"
        for found in options_of(type(settings))
        if not found.allows(getattr(settings, found.name))
    ]
