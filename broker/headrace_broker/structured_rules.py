"""Checks of a message's `structured_outputs`. Only the worker can tell whether a grammar compiles."""

import json
from collections.abc import Mapping
from typing import Any, Final

from headrace_broker.value_rules import is_unicode, shown

MAX_GRAMMAR_BYTES: Final = 65536
MAX_CHOICES: Final = 1024
_CONSTRAINTS: Final = ("json", "regex", "choice", "grammar", "json_object")
_CONTROLS: Final = frozenset(chr(code) for code in (*range(32), 127)) - set("\t\n\r")
_WHITESPACE: Final = ("disable_any_whitespace", "whitespace_pattern")


def structured_outputs_problem(value: Any) -> str | None:
    """Return the first problem, or None."""
    if not isinstance(value, Mapping):
        return f"must be a map, not {shown(value)}"
    given = {str(name): held for name, held in value.items() if held is not None}
    if unknown := [name for name in given if name not in (*_CONSTRAINTS, *_WHITESPACE)]:
        return f"must not hold {unknown[0][:40]!r}, which is not supported"
    constraints = [name for name in _CONSTRAINTS if name in given]
    if len(constraints) != 1:
        found = " and ".join(constraints) or "none"
        return f"must hold exactly one of {', '.join(_CONSTRAINTS)}, not {found}"
    problem = _constraint_problem(constraints[0], given[constraints[0]]) or _whitespace_problem(constraints[0], given)
    return problem and f"must hold valid values: {problem}"


def _constraint_problem(name: str, value: Any) -> str | None:
    if name == "json_object":
        return None if value is True else f"json_object must be true, not {shown(value)}"
    if name == "choice":
        return _choice_problem(value)
    return _schema_problem(value) if name == "json" else _text_problem(name, value)


def _schema_problem(value: Any) -> str | None:
    try:
        text = json.dumps(value, allow_nan=False) if isinstance(value, Mapping) else value
        problem = _text_problem("json", text)
        if problem is None and not isinstance(json.loads(text), dict):
            problem = "json must be a JSON schema that is a map"
    except (TypeError, ValueError, RecursionError):
        problem = "json must be a JSON schema, as a map or a string, and not too deeply nested"
    return problem


def _choice_problem(value: Any) -> str | None:
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(text, str) and text for text in value):
        return "choice must be a list of non-empty strings"
    if len(value) > MAX_CHOICES:
        return f"choice must hold at most {MAX_CHOICES} strings, not {len(value)}"
    if any(not _CONTROLS.isdisjoint(text) for text in value):
        return "choice must hold no control characters other than tabs and line breaks"
    return _text_problem("choice", "".join(value))


def _whitespace_problem(constraint: str, given: Mapping[str, Any]) -> str | None:
    compact, pattern = given.get("disable_any_whitespace", False), given.get("whitespace_pattern")
    if not isinstance(compact, bool):
        return f"disable_any_whitespace must be true or false, not {shown(compact)}"
    if (compact or pattern is not None) and constraint not in ("json", "json_object"):
        return "disable_any_whitespace and whitespace_pattern can only be given with json or json_object"
    if compact and pattern is not None:
        return "disable_any_whitespace and whitespace_pattern cannot both be given"
    return None if pattern is None else _text_problem("whitespace_pattern", pattern)


def _text_problem(name: str, text: Any) -> str | None:
    if not isinstance(text, str) or not text:
        return f"{name} must be a non-empty string, not {shown(text)}"
    if not is_unicode(text):
        return f"{name} must be valid Unicode text, without lone surrogates"
    size = len(text.encode())
    return None if size <= MAX_GRAMMAR_BYTES else f"{name} must have at most {MAX_GRAMMAR_BYTES} bytes, not {size}"
