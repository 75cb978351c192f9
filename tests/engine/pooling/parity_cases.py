"""The texts of the parity suite, and the numbers that sentence-transformers computes for them."""

from __future__ import annotations

import base64
import json
from array import array
from pathlib import Path
from typing import Any, Final

from engine.pooling.tiny_pooling_models import words

RECORDED: Final = Path(__file__).with_name("sentence_transformers.json")
"""Written by record_sentence_transformers.py."""


def _words(count: int, start: int) -> str:
    known = words()
    return " ".join(known[(start + 5 * index) % len(known)] for index in range(count))


TEXTS: Final = [
    "water",
    "The mill wheel turns the stone.",
    "caf\u00e9 \u6771\u4eac \U0001f642!",
    _words(23, 3),
    "(a) b/c - d.",
    _words(90, 1),  # longer than the models take
    "zzz qqq",
    _words(41, 7),
]
PAIRS: Final = [
    ("capital of france", "Paris is the capital of France."),
    ("water", _words(30, 2)),
    (_words(12, 4), "no"),
    ("hate", "love"),
    ("a", "the water wheel"),
    ("what is head race", _words(70, 5)),  # longer than most models take
]
VARIANTS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "query": {"prompt_name": "query"},
    "document": {"prompt_name": "document"},
    "prompt": {"prompt": "great: "},
}
"""Arguments of SentenceTransformer.encode for folders with prompts. Other folders have only the first variant."""


def variants(name: str) -> list[str]:
    return list(VARIANTS) if name.startswith("prompt-") else ["plain"]


def packed(rows: list[list[float]]) -> dict[str, Any]:
    numbers = array("f", [number for row in rows for number in row])
    return {"shape": [len(rows), len(rows[0])], "data": base64.b64encode(numbers.tobytes()).decode()}


def unpacked(entry: dict[str, Any]) -> list[list[float]]:
    numbers, (count, width) = array("f", base64.b64decode(entry["data"])), entry["shape"]
    assert len(numbers) == count * width
    return [numbers[width * index : width * (index + 1)].tolist() for index in range(count)]


def read_recorded() -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads(RECORDED.read_text())
    return recorded
