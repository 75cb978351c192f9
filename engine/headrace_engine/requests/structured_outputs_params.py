"""The form that an output must have. The input processor checks whether the grammar of the form can be compiled."""

import json as jsonlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace_engine.errors import InvalidRequestError
from headrace_engine.vllm_names import with_vllm_names
from headrace_wire.structured_outputs import StructuredOutputs

_RULE = StructuredOutputs()


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
        if problems := _RULE.problems("structured_outputs", {name: getattr(self, name) for name in self.__slots__}):
            raise InvalidRequestError(problems)
        if isinstance(self.json, dict):
            self.json = jsonlib.dumps(self.json)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "StructuredOutputsParams":
        """Build from a plain map. Unknown names are refused, and null means the default."""
        if problems := _RULE.problems("structured_outputs", values):
            raise InvalidRequestError(problems)
        return cls(**{name: value for name, value in values.items() if value is not None})
