"""The requests of the harness: everything whose continuation depends on the past, each with one right answer."""

import random
import string
from dataclasses import dataclass
from typing import Any

TOKENS = 400


@dataclass(frozen=True)
class Kind:
    """A request that gives the same tokens whenever it is sent."""

    name: str
    prompt: str
    params: dict[str, Any]

    @property
    def body(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "sampling_params": self.params}


def kinds() -> list[Kind]:
    """36 requests: greedy, seeded with log-probabilities and penalties, stop strings that straddle, early ends, and
    structured outputs, some of which fill more than one automaton of their grammar."""
    return [*(Kind(*_kind(number)) for number in range(24)), *(Kind(*_guided(number)) for number in range(12))]


def _kind(number: int) -> tuple[str, str, dict[str, Any]]:
    prompt = f"The wheel turns {number} times, " * (1 + number % 5)
    base: dict[str, Any] = {"max_tokens": TOKENS - 10 * number, "ignore_eos": True, "seed": number}
    match number % 4:
        case 0:
            return "greedy", prompt, {**base, "temperature": 0.0}
        case 1:
            penalties = {"presence_penalty": 0.5, "repetition_penalty": 1.1, "frequency_penalty": 0.2}
            return "penalties", prompt, {**base, **penalties, "temperature": 0.9, "top_p": 0.9, "logprobs": 2}
        case 2:
            # never met, so that text is held back at all times
            stop = ["the mill wheel that never turned", "zzzzzzz"]
            return "choices", prompt, {**base, "temperature": 0.9, "n": 2, "stop": stop}
        case _:
            stop = ["ee", "th", "q"]
            return "early stop", prompt, {**base, "temperature": 1.0, "n": 2, "stop": stop, "min_tokens": 5 * number}


def _guided(number: int) -> tuple[str, str, dict[str, Any]]:
    prompt = f"The wheel turns {number} times, and answers: "
    base: dict[str, Any] = {"max_tokens": TOKENS, "seed": number, "temperature": 1.0}
    match number % 4:
        case 0:
            item = {"type": "object", "properties": {"name": _text(80), "count": {"type": "integer"}}}
            schema = {**_list_of({**item, "required": ["name", "count"], "additionalProperties": False}), "minItems": 6}
            form: dict[str, Any] = {"json": schema, "disable_any_whitespace": True}
            return "guided json", prompt, {**base, "n": 2, "structured_outputs": form}
        case 1:
            form = {"json": _text(2000), "disable_any_whitespace": True}
            return "guided long text", prompt, {**base, "structured_outputs": form}
        case 2:
            form = {"regex": r"([a-z]{3,9} (\d{1,4}|[A-Z]\w+)[.,;] ){40,60}"}
            return "guided regex", prompt, {**base, "n": 2, "logprobs": 1, "structured_outputs": form}
        case _:
            draw = random.Random(number)
            labels = ["".join(draw.choices(string.ascii_letters, k=60)) for _ in range(200)]
            return "guided choice", prompt, {**base, "n": 3, "structured_outputs": {"choice": labels}}


def _text(length: int) -> dict[str, Any]:
    return {"type": "string", "minLength": length * 3 // 4, "maxLength": length}


def _list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "maxItems": 9}
