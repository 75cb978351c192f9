"""Converts arguments that a model wrote as plain text to JSON, by the types of the function's parameters."""

import json
import re
from collections.abc import Mapping
from typing import Any, Final, NoReturn
from urllib.parse import unquote

from headrace_gateway.parsers.events import EventWriter
from headrace_gateway.parsers.python_literal import json_of_python
from headrace_gateway.requests.call import Function

_ALL: Final = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
_MAX_DEPTH: Final = 64
"""Below this depth of a schema, every type counts as permitted."""
_MAX_SCHEMAS: Final = 1000
"""Schemas that are read for one argument. Later ones count as permitting every type: reading blocks the event loop."""
_TYPES: Final[dict[type, str]] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    type(None): "null",
    dict: "object",
    list: "array",
}
_INTEGER: Final = re.compile(r"-?\d+(\.0*)?")


class ObjectWriter:
    """Writes the arguments of the current call one by one. Together they are one JSON object."""

    def __init__(self, writer: EventWriter, tool: Function) -> None:
        schema = tool.parameters or {}
        properties = schema.get("properties")
        self._types = SchemaTypes(schema)
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._writer = writer
        self._written: set[str] = set()

    def add_text(self, name: str, text: str) -> None:
        """Write an argument that is plain text. The schema has its type."""
        if name not in self._written:
            self.add(name, json_of_text(text, self._types.of(self._properties.get(name))))

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


def json_of_text(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a text that has one of the types; a string if it has none of them."""
    if types == {"string"}:
        return quoted(text)
    written = text.strip()
    for candidate in (written, json_of_python(written)):
        if candidate is not None and _kinds(candidate) & types:
            return candidate
    return quoted(text)


class SchemaTypes:
    """Finds the types that a schema permits. A value must satisfy all keywords of the schema.

    Args:
        root: the schema in which the pointers of `$ref` are resolved.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_read = 0
        self._found: dict[str, frozenset[str]] = {}
        """The types of each reference. A reference to itself adds no types."""

    def of(self, schema: Any) -> frozenset[str]:
        """Return the types of JSON values that a schema permits."""
        self._num_read = 0
        return self._of(schema, _MAX_DEPTH)

    def _of(self, schema: Any, depth: int) -> frozenset[str]:
        self._num_read += 1
        if schema is False:
            return frozenset()
        if not isinstance(schema, Mapping) or depth == 0 or self._num_read > _MAX_SCHEMAS:
            return _ALL
        types = _named(schema)
        if isinstance(schema.get("$ref"), str):
            types &= self._referred(schema["$ref"], depth - 1)
        for keyword in ("anyOf", "oneOf"):
            options = schema.get(keyword)
            if isinstance(options, list) and 0 < len(options) <= _MAX_SCHEMAS:
                types &= frozenset[str]().union(*(self._of(option, depth - 1) for option in options))
        for part in schema["allOf"][:_MAX_SCHEMAS] if isinstance(schema.get("allOf"), list) else ():
            types &= self._of(part, depth - 1)
        return types

    def _referred(self, reference: str, depth: int) -> frozenset[str]:
        """Return the types of the schema at a JSON pointer such as `#/$defs/Colour`."""
        if reference not in self._found:
            self._found[reference] = frozenset()
            found: Any = self._root if reference.startswith("#") else None
            for name in unquote(reference[1:]).split("/")[1:]:
                found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
            self._found[reference] = self._of(found, depth)
        return self._found[reference]


def _named(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that `type`, `enum` and `const` permit; all types if there are none of them."""
    types = _ALL
    named = schema.get("type")
    if isinstance(named, str | list):
        names = {name for name in ([named] if isinstance(named, str) else named) if isinstance(name, str)}
        types &= names | ({"integer"} if "number" in names else set())
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        types &= _types_of(values)
    return types


def _types_of(values: list[Any]) -> frozenset[str]:
    """Return the types of decoded JSON values. A list may have hundreds of thousands of them."""
    found = set(map(type, values))
    types = {_TYPES[kind] for kind in found if kind in _TYPES}
    if float in found and any(type(value) is float and value.is_integer() for value in values):
        types.add("integer")
    return frozenset(types | {"number"} if "integer" in types else types)


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
