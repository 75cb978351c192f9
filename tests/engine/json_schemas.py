"""Random JSON schemas that at least one small document satisfies, in the subset that grammars serve.

`hypothesis-jsonschema` makes documents for a schema, not schemas; here it is the other way round.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

_NAMES = st.sampled_from(["id", "name", "Größe", "a b", "x-y", "tags", "items", "note", "n0", '"quoted"'])
_TEXTS = st.text('abcxyz -_/é東"\\', max_size=8)


def _bounded(low: int, high: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(low, high), st.integers(low, high)).map(lambda pair: (min(pair), max(pair)))


_INTEGERS = _bounded(-1000, 1000).map(lambda b: {"type": "integer", "minimum": b[0], "maximum": b[1]})
_NUMBERS = _bounded(-50, 50).map(lambda b: {"type": "number", "minimum": b[0], "maximum": b[1] + 1})
_STRINGS = _bounded(0, 12).map(lambda b: {"type": "string", "minLength": b[0], "maxLength": b[1]})
_PATTERNS = st.sampled_from(
    ["^[a-z]{2,6}$", "^\\d{3}-\\d{4}$", "^(ab|cd){1,4}$", "^[A-Z][a-z]{0,5}( [a-z]{1,4}){0,2}$"]
).map(lambda pattern: {"type": "string", "pattern": pattern})
_FORMATS = st.sampled_from(["date", "time", "date-time", "uuid", "ipv4"]).map(
    lambda name: {"type": "string", "format": name}
)
_VALUES = st.none() | st.booleans() | st.integers(-99, 99) | _TEXTS
_ENUMS = st.lists(_VALUES, min_size=1, max_size=5).map(lambda values: {"enum": values})
_CONSTANTS = (_VALUES | st.lists(_VALUES, max_size=3) | st.dictionaries(_NAMES, _VALUES, max_size=2)).map(
    lambda value: {"const": value}
)
_LEAVES: st.SearchStrategy[Schema] = st.one_of(
    _INTEGERS,
    _NUMBERS,
    _STRINGS,
    _PATTERNS,
    _FORMATS,
    _ENUMS,
    _CONSTANTS,
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}]),
)


def _arrays(items: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.builds(
        lambda item, bounds: {"type": "array", "items": item, "minItems": bounds[0], "maxItems": bounds[1]},
        items,
        _bounded(0, 3),
    )


def _tuples(items: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.lists(items, min_size=1, max_size=3).map(
        lambda prefix: {"type": "array", "prefixItems": prefix, "items": False, "minItems": len(prefix)}
    )


@st.composite
def _objects(draw: st.DrawFn, items: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(_NAMES, items, min_size=1, max_size=4))
    required = [name for name in properties if draw(st.booleans())]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _unions(items: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.lists(items, min_size=2, max_size=3).map(lambda options: {"anyOf": options})


@st.composite
def _referring(draw: st.DrawFn, items: st.SearchStrategy[Schema]) -> Schema:
    """A tree whose branches are bounded, so that its documents are, too."""
    leaf = draw(items)
    node = {
        "type": "object",
        "properties": {
            "value": {"$ref": "#/$defs/leaf"},
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]},
        },
        "required": ["value"],
        "additionalProperties": False,
    }
    return {"$ref": "#/$defs/node", "$defs": {"leaf": leaf, "node": node}}


_SCHEMAS = st.recursive(
    _LEAVES, lambda inner: st.one_of(_arrays(inner), _tuples(inner), _objects(inner), _unions(inner)), max_leaves=6
)


def schemas() -> st.SearchStrategy[Schema]:
    return st.one_of(_objects(_SCHEMAS), _SCHEMAS, _referring(_LEAVES))
