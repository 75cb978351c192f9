"""Converts arguments that a model wrote as plain text to JSON, by the types of the function's parameters."""

import json
import re
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from headrace_gateway.call import ToolForm
from headrace_gateway.parsers.event_writer import EventWriter
from headrace_gateway.parsers.python_literal import json_of_python

_ALL: Final = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
_INTEGER: Final = re.compile(r"-?\d+(\.0*)?")


class ObjectWriter:
    """Writes the arguments of the current call one by one. Together they are one JSON object."""

    def __init__(self, writer: EventWriter, tool: ToolForm) -> None:
        properties = (tool.parameters or {}).get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._writer = writer
        self._written: set[str] = set()

    def add_text(self, name: str, text: str) -> None:
        """Write an argument whose type is in the schema only."""
        if name not in self._written:
            self.add(name, json_of_text(text, self._properties.get(name)))

    def add(self, name: str, written: str) -> None:
        """Write an argument that is JSON. A repeated name is dropped."""
        if name not in self._written:
            self._writer.arguments(f"{', ' if self._written else '{'}{quoted(name)}: {written}")
            self._written.add(name)

    def end(self) -> None:
        if self._written:
            self._writer.arguments("}")
        self._writer.end_call()


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def json_of_text(text: str, schema: Any) -> str:
    """Return the JSON of a text, by the types in its schema; a string if it has none of them."""
    types = _types(schema)
    if types == {"string"}:
        return quoted(text)
    written = text.strip()
    for candidate in (written, json_of_python(written)):
        if candidate is not None and _kinds(candidate) & types:
            return candidate
    return quoted(text)


def _types(schema: Any) -> frozenset[str]:
    """Return the types that a schema names; all types if it names none."""
    if not isinstance(schema, Mapping):
        return _ALL
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str))
    for keyword in ("anyOf", "oneOf"):
        options = schema.get(keyword)
        if isinstance(options, list) and options:
            # One level is enough: deeper types are not restricted.
            return frozenset[str]().union(*(_types_of_option(option) for option in options))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset[str]().union(*(_kinds(json.dumps(value)) for value in values))
    return _ALL


def _types_of_option(option: Any) -> frozenset[str]:
    named = option.get("type") if isinstance(option, Mapping) else None
    return frozenset({named}) if isinstance(named, str) else _ALL


def _kinds(written: str) -> frozenset[str]:
    """Return the types of a JSON text; none if it is not JSON, or nested too deeply to check."""
    try:
        value = json.loads(written, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return frozenset()
    match value:
        case bool():
            return frozenset({"boolean"})
        case int() | float():
            return frozenset({"integer", "number"} if _INTEGER.fullmatch(written) else {"number"})
        case str():
            return frozenset({"string"})
        case None:
            return frozenset({"null"})
        case dict():
            return frozenset({"object"})
        case _:
            return frozenset({"array"})


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
