"""The form of an output. The input processor checks whether its grammar can be compiled."""

import json as jsonlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from headrace_engine.errors import InvalidRequestError
from headrace_engine.vllm_names import with_vllm_names

MAX_GRAMMAR_BYTES = 65536
"""Maximum bytes of a schema, regular expression, grammar, or of all choices, as UTF-8."""
MAX_CHOICES = 1024
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")
_CONTROLS = frozenset(chr(code) for code in (*range(32), 127)) - set("\t\n\r")


@with_vllm_names("StructuredOutputsParams", InvalidRequestError)
@dataclass(slots=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one form that the output must have, with vLLM's names.

    Raises:
        InvalidRequestError: no form or more than one is given, or a value has the wrong type or is too large.
    """

    json: str | dict[str, Any] | None = None
    """A JSON schema, as a map or as text. Stored as text."""
    regex: str | None = None
    """A regular expression for the whole output, without look-around and back-references."""
    choice: list[str] | None = None
    """The output is one of these texts."""
    grammar: str | None = None
    """A context-free grammar in Lark's syntax (rule `start`) or in GBNF (rule `root`)."""
    json_object: bool | None = None
    """True: any JSON object."""
    disable_any_whitespace: bool = False
    """No whitespace between the tokens of JSON."""
    whitespace_pattern: str | None = None
    """A regular expression for the whitespace between the tokens of JSON."""

    def __post_init__(self) -> None:
        choice: object = self.choice
        if isinstance(choice, tuple):
            self.choice = [*choice]
        problems = list(self._problems())
        if problems:
            raise InvalidRequestError([f"structured_outputs: {problem}" for problem in problems])
        if isinstance(self.json, dict):
            self.json = jsonlib.dumps(self.json)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "StructuredOutputsParams":
        """Build from a plain map. Unknown names are refused."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(str(name)[:40] for name in values if name not in known)
        if unknown:
            raise InvalidRequestError([f"structured_outputs: {name!r} is not supported" for name in unknown])
        return cls(**values)

    def _problems(self) -> Iterator[str]:
        given = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            yield f"{' and '.join(given) or 'nothing'} is given, expected exactly one of {', '.join(_CONSTRAINTS)}"
        compact: object = self.disable_any_whitespace
        if not isinstance(compact, bool):
            yield f"disable_any_whitespace is {self.disable_any_whitespace!r}, expected true or false"
        if self.json_object not in (None, True):
            yield f"json_object is {self.json_object!r}, expected true"
        for name in ("regex", "grammar", "whitespace_pattern"):
            yield from _text_problems(name, getattr(self, name))
        if self.choice is not None:
            yield from _choice_problems(self.choice)
        if self.json is not None:
            yield from _schema_problems(self.json)
        if self.json is None and self.json_object is None:
            if self.whitespace_pattern is not None or self.disable_any_whitespace is True:
                yield "disable_any_whitespace and whitespace_pattern go with json and json_object only"
        elif self.whitespace_pattern is not None and self.disable_any_whitespace is True:
            yield "disable_any_whitespace and whitespace_pattern contradict each other"


def _text_problems(name: str, value: object) -> Iterator[str]:
    if value is None:
        return
    if not isinstance(value, str) or not value:
        yield f"{name} must be a text that is not empty"
    else:
        yield from _size_problems(name, value)


def _size_problems(name: str, text: str) -> Iterator[str]:
    if any("\ud800" <= char <= "\udfff" for char in text):
        yield f"{name} is no valid Unicode: it holds a lone surrogate"
    elif (size := len(text.encode())) > MAX_GRAMMAR_BYTES:
        yield f"{name} has {size} bytes, the limit is {MAX_GRAMMAR_BYTES}"


def _choice_problems(choice: object) -> Iterator[str]:
    if not isinstance(choice, list) or not choice or not all(isinstance(text, str) and text for text in choice):
        yield "choice must be a list of texts, none of them empty"
    elif len(choice) > MAX_CHOICES:
        yield f"choice holds {len(choice)} texts, the limit is {MAX_CHOICES}"
    elif any(not _CONTROLS.isdisjoint(text) for text in choice):
        yield "choice holds control characters other than tab and line ends"
    else:
        yield from _size_problems("choice", "".join(choice))


def _schema_problems(schema: object) -> Iterator[str]:
    if not isinstance(schema, str | dict):
        yield "json must be a JSON schema: a map, or its text"
        return
    try:
        text = schema if isinstance(schema, str) else jsonlib.dumps(schema, allow_nan=False)
        if size_problems := list(_size_problems("json", text)):
            yield from size_problems
        elif not isinstance(jsonlib.loads(text), dict):
            yield "json must be a JSON schema that is a map"
    except RecursionError:
        yield "json is nested too deeply"
    except (ValueError, TypeError) as error:
        yield f"json is no valid JSON: {error}"
