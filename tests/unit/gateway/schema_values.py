"""Values for a JSON Schema: those that it accepts, its limits, and values just beyond them."""

from typing import Any

from hypothesis import strategies as st

from headrace_wire.rules import Schema

OTHERS = [None, True, False, -1, 0, 1, 2.5, 10**30, "", "a", "1", "\n", [], [1], [""], {}, {"1": 1}]
"""Values of every kind."""
_OTHERS = st.sampled_from(OTHERS)


def around(schema: Schema) -> st.SearchStrategy[Any]:
    """Return values that the schema accepts, or nearly."""
    return st.one_of(_OTHERS, _of(schema), _of(schema), _of(schema))


def _of(schema: Schema) -> st.SearchStrategy[Any]:
    for key in ("anyOf", "oneOf"):
        if key in schema and "type" not in schema:
            return st.one_of(*map(_of, schema[key]))
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "const" in schema:
        return st.just(schema["const"])
    kind = schema.get("type")
    if isinstance(kind, list):
        return st.one_of(*(_of({**schema, "type": each}) for each in kind))
    return _KINDS[kind](schema) if kind in _KINDS else _OTHERS


def _integers(schema: Schema) -> st.SearchStrategy[Any]:
    low, high = schema.get("minimum", 0), schema.get("maximum", 2**31)
    return st.one_of(st.sampled_from([low - 1, low, high, high + 1]), st.integers(low, high))


def _numbers(schema: Schema) -> st.SearchStrategy[Any]:
    low = schema.get("minimum", schema.get("exclusiveMinimum", -1e3))
    high = schema.get("maximum", 1e6)
    edges = [low - 1, low - 1e-3, low, low + 1e-3, high - 1e-3, high, high + 1e-3, high + 1, int(low), int(high)]
    return st.one_of(st.sampled_from(edges), st.floats(low, high))


def _strings(schema: Schema) -> st.SearchStrategy[Any]:
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    lengths = [max(least - 1, 0), least, least + 1, *([] if most is None else [most, most + 1])]
    plain = st.sampled_from([length for length in lengths if length < 10_000]).map(lambda length: "x" * length)
    beside = st.text(st.characters(codec="utf-8"), max_size=4)
    if "pattern" in schema:
        near = st.sampled_from(["2147483647", "2147483648", "9999999999", "-1", "01", "a\n", "\u200b", "x" * 201])
        return st.one_of(st.from_regex(schema["pattern"][:-1] + r"\Z"), near, beside)
    return st.one_of(plain, beside)


def _arrays(schema: Schema) -> st.SearchStrategy[Any]:
    items = schema.get("items", {})
    least, most = schema.get("minItems", 0), schema.get("maxItems", 20)
    short = st.lists(around(items), min_size=max(least - 1, 0), max_size=min(most + 1, 3))
    if most > 2000:
        return short
    long = st.tuples(_of(items), st.sampled_from([most, most + 1])).map(lambda pair: [pair[0]] * pair[1])
    return st.one_of(short, short, long)


def _objects(schema: Schema) -> st.SearchStrategy[Any]:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    known = st.fixed_dictionaries(
        {name: _of(properties.get(name, {})) for name in required},
        optional={name: around(each) for name, each in properties.items() if name not in required},
    )
    keys = _of({"type": "string", **schema["propertyNames"]}) if "propertyNames" in schema else st.text(max_size=3)
    if "not" in schema.get("propertyNames", {}):
        keys = st.one_of(keys, st.sampled_from(schema["propertyNames"]["not"]["enum"]))
    more = schema.get("additionalProperties", {})
    others = st.dictionaries(keys, around(more if isinstance(more, dict) else {}), max_size=3)
    dropped = st.sampled_from([None, *required])
    return st.tuples(known, others, dropped, st.integers(0, 9)).map(_merged)


def _merged(drawn: tuple[dict[str, Any], dict[str, Any], str | None, int]) -> dict[str, Any]:
    known, others, dropped, dice = drawn
    made = {**known, **(others if dice < 4 or not known else {})}
    if dice == 9 and dropped is not None:
        made.pop(dropped, None)
    return made


_KINDS: dict[Any, Any] = {
    "integer": _integers,
    "number": _numbers,
    "string": _strings,
    "array": _arrays,
    "object": _objects,
    "boolean": lambda _: st.booleans(),
    "null": lambda _: st.none(),
}
