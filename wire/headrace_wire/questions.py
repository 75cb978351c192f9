"""The keyword arguments of the task `headrace.decide`: an input, and questions about it.

A question is a predicate, a choice or a score.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from headrace_wire.chat import MESSAGES, NAME, messages_problem, text_size_problem, texts_of
from headrace_wire.request import LORA
from headrace_wire.rules import Fields, ListOf, OneOf, Rule, Schema, Text, size_problem
from headrace_wire.values import named, shown

MAX_QUESTIONS: Final = 400
MAX_OPTIONS: Final = 255
_MIN_OPTIONS: Final = 2
QUESTION_TYPES: Final = ("predicate", "choice", "score")

_TYPE: Final = OneOf(QUESTION_TYPES)
_TEXT: Final = Text(least=1)
_COMMON: Final[Mapping[str, Rule]] = {"type": _TYPE, "instructions": _TEXT, "name": Text()}
_LEVEL: Final = Fields({"label": _TEXT, "description": Text()}, required=("label",))
_OPTIONS: Final = {"choice": ("choices", "value"), "score": ("levels", "label")}
"""Question type -> the field of its options, and the key that must differ between them."""


@dataclass(frozen=True, slots=True)
class GivenInput(Rule):
    """What the questions are about: a text, or the messages of a chat."""

    def problem(self, path: str, value: Any) -> str | None:
        if isinstance(value, str):
            return Text(least=1).problem(path, value)
        if not isinstance(value, (list, tuple)):
            return f"{path} must be a text or a list of messages, got {shown(value)}"
        return messages_problem(value, path)

    @property
    def schema(self) -> Schema:
        return {"anyOf": [Text(least=1).schema, MESSAGES.schema]}


@dataclass(frozen=True, slots=True)
class Questions(Rule):
    """A list of questions."""

    def problem(self, path: str, value: Any) -> str | None:  # noqa: ARG002  # the questions are the field of this name
        return "; ".join(question_problems(value)) or None

    @property
    def schema(self) -> Schema:
        kinds = [_question_rule(kind).schema for kind in QUESTION_TYPES]
        return {"type": "array", "items": {"anyOf": kinds}, "minItems": 1, "maxItems": MAX_QUESTIONS}


def _question_rule(kind: str) -> Fields:
    fields = {**_COMMON, "type": OneOf((kind,))}
    if kind not in _OPTIONS:
        return Fields(fields, required=("type", "instructions"))
    name, key = _OPTIONS[kind]
    return Fields({**fields, name: _options_rule(key)}, required=("type", "instructions", name))


def _options_rule(key: str) -> ListOf:
    return ListOf(_LEVEL if key == "label" else _Choice(), "options", MAX_OPTIONS, _MIN_OPTIONS)


QUESTIONS: Final = Questions()
_RULES: Final[Mapping[str, Rule]] = {"input": GivenInput(), "model": NAME, "lora": LORA}
DECIDE_KEYS: Final = (*_RULES, "questions")


def decide_problems(given: Mapping[str, Any]) -> list[str]:
    """Return every problem of the keyword arguments of `headrace.decide`. `given` must not contain null values."""
    problems = [f"unknown key {named(key)}" for key in given if key not in DECIDE_KEYS]
    problems += [f"{key} must be given" for key in ("input", "questions") if key not in given]
    for name, rule in _RULES.items():
        if name in given and (problem := rule.problem(name, given[name])):
            problems.append(problem)
    if "questions" in given:
        problems += question_problems(given["questions"])
    if not problems:
        texts = "".join(texts_of([given["input"], given["questions"]]))
        problems += [problem for problem in [text_size_problem("input with questions", texts)] if problem]
    return problems


def question_problems(questions: Any) -> list[str]:
    """Return every problem of the questions of one input."""
    if not isinstance(questions, (list, tuple)):
        return [f"questions must be a list of questions, got {shown(questions)}"]
    if problem := size_problem("questions", questions, "questions", MAX_QUESTIONS, 1):
        return [problem]
    return [text for at, question in enumerate(questions) for text in _problems(f"questions[{at}]", question)]


def _problems(path: str, question: Any) -> Iterator[str]:
    if not isinstance(question, Mapping):
        yield f"{path} must be a map, got {shown(question)}"
        return
    if problem := _TYPE.problem(f"{path}.type", question.get("type")):
        yield problem
        return
    options, key = _OPTIONS.get(question["type"], ("", ""))
    known = (*_COMMON, options) if options else (*_COMMON,)
    for name, value in question.items():
        if name not in known and value is not None:
            yield f"{path} must hold only {', '.join(known)}, got {named(name)}"
    for name, rule in _COMMON.items():
        if question.get(name) is None:
            if name != "name":
                yield f"{path}.{name} is required"
        elif problem := rule.problem(f"{path}.{name}", question[name]):
            yield problem
    if options:
        yield from _option_problems(f"{path}.{options}", question.get(options), key)


def _option_problems(path: str, given: Any, key: str) -> Iterator[str]:
    if given is None:
        yield f"{path} is required"
        return
    if problem := _options_rule(key).problem(path, given):
        yield problem
        return
    seen: dict[tuple[type, Any], int] = {}
    for at, option in enumerate(given):
        value = option[key]
        first = seen.setdefault((type(value), value), at)  # true and "true" differ
        if first != at:
            yield f"{path}[{at}].{key} is the same as that of {path}[{first}]: each must be unique"


class _Choice(Rule):
    """A map of `value`, a text or a boolean, and `description`."""

    def problem(self, path: str, value: Any) -> str | None:
        if isinstance(value, Mapping) and isinstance(value.get("value"), bool):
            value = {**value, "value": "true"}
        return self._fields.problem(path, value)

    _fields = Fields({"value": _TEXT, "description": Text()}, required=("value",))

    @property
    def schema(self) -> dict[str, Any]:
        found = self._fields.schema
        value = {"anyOf": [found["properties"]["value"], {"type": "boolean"}]}
        return {**found, "properties": {**found["properties"], "value": value}}
