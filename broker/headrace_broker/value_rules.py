"""Small questions about values that a producer sent."""

import math


def shown(value: object) -> str:
    """A value as an error message may show it: numbers and names, but never text that could be a prompt."""
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)[:40]
    if isinstance(value, (str, bytes)):
        return f"{type(value).__name__} of length {len(value)}"
    return type(value).__name__


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: float) -> bool:
    """Whether a number, which may be any integer, can be computed with as a float."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def is_unicode(text: str) -> bool:
    """Lone surrogates are the only strings that UTF-8, and so msgpack, cannot carry."""
    return not any("\ud800" <= char <= "\udfff" for char in text)
