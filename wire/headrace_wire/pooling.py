"""The keyword arguments of the pooling tasks: inputs for which a model computes one row of numbers each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from headrace_wire.chat import MAX_TEXT_BYTES, NAME
from headrace_wire.rules import Boolean, Integer, OneOf, Rule, Schema, Text
from headrace_wire.sampling import MAX_TOKEN_ID, TOKEN_ID
from headrace_wire.values import is_integer, named, shown

PoolingTask: TypeAlias = Literal["embed", "score", "classify"]
POOLING_TASKS: Final[tuple[PoolingTask, ...]] = ("embed", "score", "classify")

MAX_INPUTS: Final = 2048
MAX_INPUT_TOKENS: Final = 300_000
"""Tokens of all inputs of a message together, after truncation."""
MAX_ROW_BYTES: Final = 16 * 2**20
"""Size of all rows of a message together."""
TRUNCATE: Final = ("error", "start", "end")
"""What is cut off a long input. `error` refuses it instead."""
_SHOWN_PROBLEMS: Final = 8
"""A message names this many of its wrong inputs, and counts the others."""

Kind: TypeAlias = Literal["text", "ids", "pair"]
_NOUNS: Final[Mapping[Kind, tuple[str, str]]] = {
    "text": ("text", "texts"),
    "ids": ("a list of token ids", "lists of token ids"),
    "pair": ("a pair of texts", "pairs of texts"),
}


@dataclass(frozen=True, slots=True)
class Inputs(Rule):
    """A list of inputs of these kinds, or one text. A list holds token ids only, or none."""

    kinds: tuple[Kind, ...]

    def problem(self, path: str, value: Any) -> str | None:
        return "; ".join(self.problems(path, value)) or None

    def problems(self, path: str, value: Any, *, is_call: bool = False) -> list[str]:
        """Return the problem of each wrong input, with its index.

        With `is_call`, number and size of the inputs are not limited: a client sends them in several messages.
        """
        plural = " or ".join(_NOUNS[kind][1] for kind in self.kinds)
        if isinstance(value, str):
            return [*self._input_problems(path, value)] or _size_problems(path, [value])
        if not isinstance(value, (list, tuple)):
            return [f"{path} must be a text or a list of {plural}, got {shown(value)}"]
        if not value or (len(value) > MAX_INPUTS and not is_call):
            return [f"{path} must hold 1 to {MAX_INPUTS} {plural}, got {len(value)}"]
        wrong = [text for index, item in enumerate(value) for text in self._input_problems(f"{path}[{index}]", item)]
        found = wrong[:_SHOWN_PROBLEMS]
        if len(wrong) > len(found):
            found.append(f"{path} has {len(wrong) - len(found)} more problems of this kind")
        if wrong:
            return found
        if len({kind_of(item) == "ids" for item in value}) > 1:
            return [f"{path} must hold inputs of one kind, got texts and lists of token ids"]
        return [] if is_call else _size_problems(path, value)

    def _input_problems(self, path: str, item: Any) -> Iterator[str]:
        kind = kind_of(item)
        if kind not in self.kinds:
            yield f"{path} must be {' or '.join(_NOUNS[kind][0] for kind in self.kinds)}, got {shown(item)}"
        elif not item:
            yield f"{path} must not be empty"
        elif kind == "ids":
            if not TOKEN_ID.holds_all(item):
                yield from _first_problem(path, item, TOKEN_ID)
        else:
            for place, text in [(path, item)] if kind == "text" else [(f"{path}[{n}]", item[n]) for n in (0, 1)]:
                if not text:
                    yield f"{place} must not be empty"
                elif problem := Text().problem(place, text):
                    yield problem

    @property
    def schema(self) -> Schema:
        text = Text(least=1).schema
        pair = {"type": "array", "items": text, "minItems": 2, "maxItems": 2}
        texts = {"anyOf": [text, pair]} if "pair" in self.kinds else text
        lists = [texts]
        if "ids" in self.kinds:
            lists.append({"type": "array", "items": TOKEN_ID.schema, "minItems": 1})
        sizes = {"minItems": 1, "maxItems": MAX_INPUTS}
        return {"anyOf": [text, *({"type": "array", "items": items, **sizes} for items in lists)]}


def kind_of(item: object) -> Kind | None:
    """Return the kind of an input. A list of two texts is a pair; an empty list counts as token ids."""
    if isinstance(item, str):
        return "text"
    if not isinstance(item, (list, tuple)):
        return None
    if len(item) == 2 and all(isinstance(part, str) for part in item):
        return "pair"
    return "ids" if not item or is_integer(item[0]) else None


def _first_problem(path: str, ids: Any, rule: Integer) -> Iterator[str]:
    found = (rule.problem(f"{path}[{index}]", token_id) for index, token_id in enumerate(ids))
    yield from [next(problem for problem in found if problem)]


def _size_problems(path: str, inputs: Any) -> list[str]:
    texts = [part for item in inputs for part in ([item] if isinstance(item, str) else item) if isinstance(part, str)]
    if sum(map(len, texts)) > MAX_TEXT_BYTES // 4:  # a character has at most four bytes
        size = sum(len(text.encode()) for text in texts)
        if size > MAX_TEXT_BYTES:
            return [f"{path} must have at most {MAX_TEXT_BYTES} bytes of UTF-8 together, got {size}"]
    return []


_BOOLEAN: Final = Boolean()
_TOKENS: Final = Integer(1, MAX_TOKEN_ID)
_TRUNCATE: Final = OneOf(TRUNCATE)
_PROMPT: Final = Text(65_536)
_TEXTS: Final = Inputs(("text",))

POOLING: Final[Mapping[PoolingTask, Mapping[str, Rule]]] = {
    "embed": {
        "input": Inputs(("text", "ids")),
        "prompt_name": NAME,
        "prompt": _PROMPT,
        "dimensions": _TOKENS,
        "normalize": _BOOLEAN,
        "truncate": _TRUNCATE,
        "max_tokens": _TOKENS,
        "add_special_tokens": _BOOLEAN,
        "model": NAME,
    },
    "score": {
        "query": Text(least=1),
        "queries": _TEXTS,
        "documents": _TEXTS,
        "activation": _BOOLEAN,
        "truncate": _TRUNCATE,
        "max_tokens": _TOKENS,
        "model": NAME,
    },
    "classify": {
        "input": Inputs(("text", "pair", "ids")),
        "activation": _BOOLEAN,
        "truncate": _TRUNCATE,
        "max_tokens": _TOKENS,
        "model": NAME,
    },
}
"""The fields of each task."""
_HINTS: Final = {
    **dict.fromkeys(("query", "queries", "documents"), "the task headrace.score takes it"),
    **dict.fromkeys(
        ("messages", "prompt_token_ids", "sampling_params", "tools", "lora", "temperature", "stop"),
        "the task headrace.generate takes it",
    ),
    **dict.fromkeys(("top_k", "top_n"), "the answer has the scores of all documents: sort them, or use Client.rerank"),
    **dict.fromkeys(("image", "images"), "only texts and token ids are supported"),
    "encoding_format": "the answer holds raw float32",
    "input": "give query or queries, and documents",
    **dict.fromkeys(("dimensions", "normalize", "prompt", "prompt_name"), "the task headrace.embed takes it"),
}
"""What to do instead of an unknown field."""


def pooling_problems(task: PoolingTask, given: Mapping[str, Any], *, is_call: bool = False) -> list[str]:
    """Return every problem of the keyword arguments of a pooling task. `given` must not contain null values.

    `is_call`: see `Inputs.problems`.
    """
    rules = POOLING[task]
    problems = [_unknown(key) for key in given if key not in rules]
    for name, rule in rules.items():
        if name not in given:
            continue
        if isinstance(rule, Inputs):
            problems += rule.problems(name, given[name], is_call=is_call)
        elif problem := rule.problem(name, given[name]):
            problems.append(problem)
    return [*problems, *_CONTRADICTIONS[task](given)]


def _unknown(key: object) -> str:
    hint = _HINTS.get(key) if isinstance(key, str) else None
    return f"unknown key {named(key)}" + (f": {hint}" if hint else "")


def _embed(given: Mapping[str, Any]) -> Iterator[str]:
    if "input" not in given:
        yield "input must be given"
    if "prompt" in given and "prompt_name" in given:
        yield "prompt must be absent when prompt_name is given"
    inputs = given.get("input")
    if isinstance(inputs, (list, tuple)) and any(kind_of(item) == "ids" for item in inputs):
        for name in ("prompt", "prompt_name"):
            if name in given:
                yield f"{name} must be absent when input holds token ids: put its tokens into each input"
        if given.get("add_special_tokens") is True:
            yield "add_special_tokens must be absent when input holds token ids: they are the whole input"


def _score(given: Mapping[str, Any]) -> Iterator[str]:
    queries = [key for key in ("query", "queries") if key in given]
    if len(queries) != 1:
        yield f"exactly one of query, queries must be given, got {' and '.join(queries) or 'none'}"
    if "documents" not in given:
        yield "documents must be given"
    elif isinstance(given["documents"], (list, tuple)) and isinstance(given.get("queries"), (list, tuple)):
        counts = len(given["queries"]), len(given["documents"])
        if counts[0] not in (1, counts[1]):
            yield f"queries has {counts[0]} entries, documents {counts[1]}: both must have as many, or queries one"


def _classify(given: Mapping[str, Any]) -> Iterator[str]:
    if "input" not in given:
        yield "input must be given"


_CONTRADICTIONS: Final[Mapping[PoolingTask, Callable[[Mapping[str, Any]], Iterator[str]]]] = {
    "embed": _embed,
    "score": _score,
    "classify": _classify,
}

_DOES: Final = {
    "generate": ("generates", "does not generate"),
    "decide": ("answers questions", "does not answer questions"),
    "embed": ("computes embeddings", "does not compute embeddings"),
    "score": ("scores pairs", "does not score pairs"),
    "classify": ("classifies texts", "does not classify texts"),
}

_TASK_NAMES: Final = {task: f"the task headrace.{task}" for task in _DOES}


def wrong_task(model: str, serves: Sequence[str], asked: str, places: Mapping[str, str] = _TASK_NAMES) -> str:
    """Return the refusal of a task that the model does not serve. A task is `generate`, `decide` or a pooling task.

    Args:
        places: where the caller can send each task.
    """
    known = [task for task in serves if task in _DOES]  # a newer worker may serve others
    does = " and ".join(_DOES[task][0] for task in known) or "serves other tasks"
    instead = " or ".join(places[task] for task in known)
    return f"model {named(model)} {does}; it {_DOES[asked][1]}" + (f": use {instead}" if instead else "")
