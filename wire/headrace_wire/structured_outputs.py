"""`structured_outputs`: the one form that an output must have. Only the engine can tell whether a grammar compiles."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from headrace_wire.rules import Boolean, ListOf, Rule, Schema, Text, or_null
from headrace_wire.values import is_unicode, named, shown

MAX_GRAMMAR_BYTES: Final = 65536
"""Maximum bytes of a schema, regular expression, grammar, or of all choices, as UTF-8."""
MAX_CHOICES: Final = 1024
FORMS: Final = ("json", "regex", "choice", "grammar", "json_object")
"""The forms. Exactly one is given."""
_CONTROLS: Final = frozenset(chr(code) for code in (*range(32), 127)) - set("\t\n\r")
_GRAMMAR: Final = Text(MAX_GRAMMAR_BYTES, least=1)


@dataclass(frozen=True, slots=True)
class _JsonSchema(Rule):
    """A JSON Schema that is a map, or its text."""

    def problem(self, path: str, value: Any) -> str | None:
        try:
            text = json.dumps(value, allow_nan=False) if isinstance(value, Mapping) else value
            if not isinstance(text, str) or not text:
                return f"{path} must be a JSON Schema, as a map or a string, got {shown(value)}"
            problem = _size_problem(path, text)
            if problem is None and not isinstance(found := json.loads(text), dict):
                problem = f"{path} must be a JSON Schema that is a map, got {shown(found)}"
        except RecursionError:
            problem = f"{path} must be a JSON Schema that is not too deeply nested"
        except (TypeError, ValueError) as error:
            problem = f"{path} must be a JSON Schema, as a map or a string: {_reason(error)}"
        return problem

    @property
    def schema(self) -> Schema:
        return {"anyOf": [{"type": "object"}, _GRAMMAR.schema]}


@dataclass(frozen=True, slots=True)
class _Grammar(Rule):
    """The text of a regular expression or a grammar."""

    def problem(self, path: str, value: Any) -> str | None:
        return _GRAMMAR.problem(path, value) or _size_problem(path, value)

    @property
    def schema(self) -> Schema:
        return _GRAMMAR.schema


@dataclass(frozen=True, slots=True)
class _Choice(Rule):
    """A list of texts."""

    listed: ListOf

    def problem(self, path: str, value: Any) -> str | None:
        if problem := self.listed.problem(path, value):
            return problem
        if any(not _CONTROLS.isdisjoint(text) for text in value):
            return f"{path} must hold no control characters other than tabs and line breaks"
        return _size_problem(path, "".join(value))

    @property
    def schema(self) -> Schema:
        pattern = r"^[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f]*$"
        return self.listed.schema | {"items": self.listed.item.schema | {"pattern": pattern}}


@dataclass(frozen=True, slots=True)
class _Yes(Rule):
    """Only true: false would ask for nothing."""

    def problem(self, path: str, value: Any) -> str | None:
        return None if value is True else f"{path} must be true, got {shown(value)}"

    @property
    def schema(self) -> Schema:
        return {"const": True}


_RULES: Final[Mapping[str, Rule]] = {
    "json": _JsonSchema(),
    "regex": _Grammar(),
    "choice": _Choice(ListOf(Text(least=1), "strings", MAX_CHOICES, least=1)),
    "grammar": _Grammar(),
    "json_object": _Yes(),
    "disable_any_whitespace": Boolean(),
    "whitespace_pattern": _Grammar(),
}


@dataclass(frozen=True, slots=True)
class StructuredOutputs(Rule):
    """A map of exactly one form and options for the white space in JSON."""

    def problem(self, path: str, value: Any) -> str | None:
        return next(iter(self.problems(path, value)), None)

    def problems(self, path: str, value: Any) -> list[str]:
        """Return every problem."""
        if not isinstance(value, Mapping):
            return [f"{path} must be a map, got {shown(value)}"]
        given = {name: held for name, held in value.items() if held is not None}
        problems = [f"{path} must hold only {', '.join(_RULES)}, got {named(name)}" for name in given.keys() - _RULES]
        forms = [name for name in FORMS if name in given]
        if len(forms) != 1:
            found = " and ".join(forms) or "none"
            problems.append(f"{path} must hold exactly one of {', '.join(FORMS)}, got {found}")
        for name, held in given.items():
            if name in _RULES and (problem := _RULES[name].problem(f"{path}.{name}", held)):
                problems.append(problem)
        return problems or _white_space_problems(path, given)

    @property
    def schema(self) -> Schema:
        properties = {name: or_null(rule.schema) for name, rule in _RULES.items()}
        both = {"disable_any_whitespace": {"const": True}, "whitespace_pattern": {"type": "string"}}
        return {
            "type": "object",
            "properties": properties,
            "additionalProperties": {"type": "null"},
            "oneOf": [_has(form) for form in FORMS],
            "anyOf": [_has("json"), _has("json_object"), {"properties": _NO_WHITE_SPACE_OPTIONS}],
            "not": {"properties": both, "required": [*both]},
        }


_NO_WHITE_SPACE_OPTIONS: Final = {
    "disable_any_whitespace": {"enum": [False, None]},
    "whitespace_pattern": {"type": "null"},
}


def _has(form: str) -> Schema:
    return {"required": [form], "properties": {form: {"not": {"type": "null"}}}}


def _white_space_problems(path: str, given: Mapping[str, Any]) -> list[str]:
    compact, has_pattern = given.get("disable_any_whitespace", False), "whitespace_pattern" in given
    if (compact or has_pattern) and not ("json" in given or "json_object" in given):
        option = "whitespace_pattern" if has_pattern else "disable_any_whitespace"
        return [f"{path}.{option} must be absent without json or json_object"]
    if compact and has_pattern:
        return [f"{path}.whitespace_pattern must be absent when disable_any_whitespace is true"]
    return []


def _size_problem(path: str, text: str) -> str | None:
    if not is_unicode(text):
        return f"{path} must be valid Unicode text, got a lone surrogate"
    size = len(text.encode())
    return None if size <= MAX_GRAMMAR_BYTES else f"{path} must have at most {MAX_GRAMMAR_BYTES} bytes, got {size}"


def _reason(error: Exception) -> str:
    """Return why JSON cannot be read or written, without the JSON."""
    return f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else str(error)[:100]
