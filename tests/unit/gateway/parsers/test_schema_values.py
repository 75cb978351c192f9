"""The types of arguments in formats that write plain text, by the schemas that Pydantic makes."""

import enum
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Optional

import pydantic
import pytest

from headrace_gateway.parsers.schema_values import SchemaTypes, json_of_text


class Code(enum.StrEnum):
    FIRST = "12345"
    SECOND = "true"


class Level(enum.IntEnum):
    LOW = 1


class Place(pydantic.BaseModel):
    city: str


Name = Annotated[str, pydantic.StringConstraints(max_length=20)]


class Plain(pydantic.RootModel[str]):
    pass


class Arguments(pydantic.BaseModel):
    code: Code
    maybe_code: Code | None = None
    described_code: Code = pydantic.Field(default=Code.FIRST, description="A code.")
    nested: Optional[Annotated[Code | Name, pydantic.Field(description="Either.")]] = None  # noqa: UP045
    root: Plain
    word: Literal["12345"]
    level: Level
    place: Place | None = None
    number: Annotated[float, pydantic.Field(gt=0)] | None = None
    either: int | str


SCHEMA = Arguments.model_json_schema()


def value(schema: Any, text: str, root: dict[str, Any] | None = None) -> Any:
    return json.loads(json_of_text(text, SchemaTypes(root or {}).of(schema)))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("code", "12345", "12345"),
        ("maybe_code", "true", "true"),
        ("maybe_code", "null", None),
        ("described_code", "12345", "12345"),
        ("nested", "12345", "12345"),
        ("root", "12345", "12345"),
        ("word", "12345", "12345"),
        ("level", "1", 1),
        ("place", '{"city": "Basel"}', {"city": "Basel"}),
        ("place", "12345", "12345"),
        ("number", "5", 5),
        ("either", "5", 5),
        ("either", "five", "five"),
    ],
)
def test_a_text_becomes_what_the_schema_of_pydantic_permits(name: str, text: str, expected: Any) -> None:
    assert value(SCHEMA["properties"][name], text, SCHEMA) == expected


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"allOf": [{"$ref": "#/$defs/Text"}], "default": "x"}, "12345", "12345"),  # as Pydantic 2.9 and older
        ({"anyOf": [{"anyOf": [{"type": "string"}, {"type": "null"}]}, {"enum": ["a"]}]}, "12345", "12345"),
        ({"allOf": [{"type": ["string", "integer"]}, {"not": {}}, {"type": "string"}]}, "12345", "12345"),
        ({"$ref": "#/$defs/a~1b%20c"}, "12345", "12345"),
        ({"$ref": "#/$defs/Tree"}, "12345", "12345"),
        ({"$ref": "#/$defs/Nowhere"}, "12345", 12345),
        ({"$ref": "https://example.org/schema"}, "12345", 12345),
        ({"type": "number", "enum": [1, 2.5]}, "2.5", 2.5),
        (True, "12345", 12345),
        (None, "12345", 12345),
    ],
)
def test_references_and_combined_schemas_are_followed(schema: Any, text: str, expected: Any) -> None:
    definitions = {
        "Text": {"type": "string"},
        "a/b c": {"type": "string"},
        "Tree": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "string"}]},
    }
    assert value(schema, text, {"$defs": definitions}) == expected


def test_definitions_that_all_refer_to_each_other_take_no_time() -> None:
    names = [f"d{number}" for number in range(30)]
    definitions = {name: {"anyOf": [{"$ref": f"#/$defs/{each}"} for each in names]} for name in names}
    assert value({"$ref": "#/$defs/d0"}, "1", {"$defs": definitions}) == "1"


class CountedList(list[Any]):
    """A list that counts how many values are read one by one."""

    num_read = 0

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            type(self).num_read += 1
            yield item


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "allOf"])
def test_only_the_first_thousand_of_combined_schemas_are_read(keyword: str) -> None:
    class Schemas(CountedList):
        pass

    schemas = Schemas([{"type": "string"}] * 200_000)
    assert value({keyword: schemas}, "12345") == ("12345" if keyword == "allOf" else 12345)
    assert Schemas.num_read <= 1000


def test_an_enum_of_any_size_gives_its_types() -> None:
    assert SchemaTypes({}).of({"enum": ["a", *range(200_000)]}) == {"string", "integer", "number"}
    assert SchemaTypes({}).of({"enum": [1.0]}) == {"integer", "number"}
    assert SchemaTypes({}).of({"enum": [1.5, True, None, {}, []]}) == {"number", "boolean", "null", "object", "array"}
