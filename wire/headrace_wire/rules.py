"""Rules for one value. Each refuses wrong values with a sentence, and describes the right ones as a JSON Schema."""

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from headrace_wire.values import data_problem, is_integer, is_number, is_unicode, named, shown

Schema: TypeAlias = dict[str, Any]

NO_LIMIT: Final = sys.maxsize
"""The most items of a list or map whose length is not limited."""


class Rule(ABC):
    """The values that a field may have. The schema describes values in JSON. In Python, keys of maps may be numbers."""

    @abstractmethod
    def problem(self, path: str, value: Any) -> str | None:
        """Return `<path> must ..., got ...` if the value is refused, else None."""

    @property
    @abstractmethod
    def schema(self) -> Schema:
        """The JSON Schema of the accepted values."""


@dataclass(frozen=True, slots=True)
class Anything(Rule):
    """Any value, in a field without effect."""

    def problem(self, path: str, value: Any) -> str | None:  # noqa: ARG002
        return None

    @property
    def schema(self) -> Schema:
        return {}


@dataclass(frozen=True, slots=True)
class Boolean(Rule):
    """True or false."""

    def problem(self, path: str, value: Any) -> str | None:
        return None if isinstance(value, bool) else f"{path} must be true or false, got {shown(value)}"

    @property
    def schema(self) -> Schema:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Integer(Rule):
    """An integer from `low` to `high`."""

    low: int
    high: int

    def problem(self, path: str, value: Any) -> str | None:
        if not is_integer(value):
            return f"{path} must be an integer, got {shown(value)}"
        if self.low <= value <= self.high:
            return None
        return f"{path} must be at least {self.low} and at most {self.high}, got {shown(value)}"

    def holds_all(self, values: Sequence[Any]) -> bool:
        """Return whether the rule accepts every value. It is fast for long lists."""
        return {int}.issuperset(map(type, values)) and (
            not values or (min(values) >= self.low and max(values) <= self.high)
        )

    @property
    def schema(self) -> Schema:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Number(Rule):
    """A finite number from `low` to `high`; None is no limit. With `above` it is never `low` itself."""

    low: float
    high: float | None = None
    above: bool = False

    def problem(self, path: str, value: Any) -> str | None:
        if not is_number(value):
            return f"{path} must be a finite number, got {shown(value)}"
        is_low = value <= self.low if self.above else value < self.low
        if not is_low and (self.high is None or value <= self.high):
            return None
        least = f"above {self.low:g}" if self.above else f"at least {self.low:g}"
        most = "" if self.high is None else f" and at most {self.high:g}"
        return f"{path} must be {least}{most}, got {shown(value)}"

    @property
    def schema(self) -> Schema:
        low = {"exclusiveMinimum" if self.above else "minimum": self.low}
        return {"type": "number", **low} | ({} if self.high is None else {"maximum": self.high})


@dataclass(frozen=True, slots=True)
class Text(Rule):
    """A string of `least` to `most` characters that UTF-8 can encode."""

    most: int | None = None
    least: int = 0

    def problem(self, path: str, value: Any) -> str | None:
        if not isinstance(value, str):
            return f"{path} must be a string, got {shown(value)}"
        if len(value) < self.least or (self.most is not None and len(value) > self.most):
            limits = f"at least {self.least}" if self.most is None else f"{self.least} to {self.most}"
            return f"{path} must be a string of {limits} characters, got {len(value)}"
        return None if is_unicode(value) else f"{path} must be valid Unicode text, got a lone surrogate"

    @property
    def schema(self) -> Schema:
        least = {"minLength": self.least} if self.least else {}
        return {"type": "string", **least} | ({} if self.most is None else {"maxLength": self.most})


@dataclass(frozen=True, slots=True)
class Pattern(Rule):
    """A string that matches a regular expression as a whole. `words` describe it: `1 to 64 of the characters A-Z`."""

    pattern: str
    words: str

    def problem(self, path: str, value: Any) -> str | None:
        if isinstance(value, str) and re.fullmatch(self.pattern, value):
            return None
        return f"{path} must be {self.words}, got {shown(value)}"

    @property
    def schema(self) -> Schema:
        return {"type": "string", "pattern": f"^({self.pattern})$"}


@dataclass(frozen=True, slots=True)
class OneOf(Rule):
    """One of a few strings."""

    values: tuple[str, ...]

    def problem(self, path: str, value: Any) -> str | None:
        if isinstance(value, str) and value in self.values:
            return None
        allowed = f"one of {', '.join(self.values)}" if len(self.values) > 1 else self.values[0]
        return f"{path} must be {allowed}, got {named(value)}"

    @property
    def schema(self) -> Schema:
        return {"enum": [*self.values]}


@dataclass(frozen=True, slots=True)
class ListOf(Rule):
    """A list of `least` to `most` values, each accepted by `item`. `noun` names them: `token ids`."""

    item: Rule
    noun: str
    most: int = NO_LIMIT
    least: int = 0

    def problem(self, path: str, value: Any) -> str | None:
        if not isinstance(value, (list, tuple)):
            return f"{path} must be a list of {self.noun}, got {shown(value)}"
        if size := size_problem(path, value, self.noun, self.most, self.least):
            return size
        if isinstance(self.item, Integer) and self.item.holds_all(value):
            return None
        for position, item in enumerate(value):
            if problem := self.item.problem(f"{path}[{position}]", item):
                return problem
        return None

    @property
    def schema(self) -> Schema:
        most = {} if self.most == NO_LIMIT else {"maxItems": self.most}
        return {"type": "array", "items": self.item.schema} | ({"minItems": self.least} if self.least else {}) | most


@dataclass(frozen=True, slots=True)
class OneOrMore(Rule):
    """One item of the list, or the list."""

    listed: ListOf

    def problem(self, path: str, value: Any) -> str | None:
        if isinstance(value, (list, tuple)):
            return self.listed.problem(path, value)
        if isinstance(value, str):
            return self.listed.item.problem(path, value)
        return f"{path} must be a string or a list of {self.listed.noun}, got {shown(value)}"

    @property
    def schema(self) -> Schema:
        return {"anyOf": [self.listed.item.schema, self.listed.schema]}


@dataclass(frozen=True, slots=True)
class Fields(Rule):
    """A map with these keys at most. A value of null counts as absent."""

    rules: Mapping[str, Rule]
    required: tuple[str, ...] = ()

    def problem(self, path: str, value: Any) -> str | None:
        if not isinstance(value, Mapping):
            return f"{path} must be a map of {', '.join(self.rules)}, got {shown(value)}"
        for name, inner in value.items():
            if inner is None:
                continue
            if name not in self.rules:
                return f"{path} must hold only {', '.join(self.rules)}, got {named(name)}"
            if problem := self.rules[name].problem(f"{path}.{name}", inner):
                return problem
        missing = next((name for name in self.required if value.get(name) is None), None)
        return None if missing is None else f"{path}.{missing} is required"

    @property
    def schema(self) -> Schema:
        given = {name: rule.schema if name in self.required else or_null(rule.schema) for name, rule in self.items()}
        required = {"required": [*self.required]} if self.required else {}
        return {"type": "object", "properties": given, **required, "additionalProperties": {"type": "null"}}

    def items(self) -> Sequence[tuple[str, Rule]]:
        return [*self.rules.items()]


@dataclass(frozen=True, slots=True)
class Data(Rule):
    """A map of at most `most` names to any plain data."""

    most: int = NO_LIMIT

    def problem(self, path: str, value: Any) -> str | None:
        if not isinstance(value, Mapping):
            return f"{path} must be a map from names to values, got {shown(value)}"
        return size_problem(path, value, "values", self.most) or data_problem(path, value)

    @property
    def schema(self) -> Schema:
        return {"type": "object"} | ({} if self.most == NO_LIMIT else {"maxProperties": self.most})


def problems_of(rules: Mapping[str, Rule], given: Mapping[str, Any]) -> list[str]:
    """Return the problem of each field that has one. Every field must be given."""
    return [problem for name, rule in rules.items() if (problem := rule.problem(name, given[name]))]


def size_problem(path: str, value: Any, noun: str, most: int, least: int = 0) -> str | None:
    """Return the problem of the number of items in a list or map, or None."""
    if least <= len(value) <= most:
        return None
    limits = f"at most {most}" if not least else f"at least {least}" if most == NO_LIMIT else f"{least} to {most}"
    return f"{path} must hold {limits} {noun}, got {len(value)}"


def or_null(schema: Schema) -> Schema:
    """Return a schema that also allows null."""
    if not schema or {"type": "null"} in schema.get("anyOf", []):
        return schema
    return {"anyOf": [schema, {"type": "null"}]}
