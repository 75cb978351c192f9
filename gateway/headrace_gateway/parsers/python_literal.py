"""Literals of Python, turned into JSON without building values, so that no depth of nesting costs recursion."""

import ast
import json
import re
from typing import Final

_TOKEN: Final = re.compile(
    r"""(?xs)
    \s*(?:
        (?P<string>[rRuU]?(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"))
      | (?P<number>[+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)
      | (?P<word>[A-Za-z_]\w*)
      | (?P<open>[\[({]) | (?P<close>[\])}]) | (?P<mark>[,:])
    )\s*"""
)
_WORDS: Final = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_BRACKETS: Final = {"[": "[", "(": "[", "{": "{", "]": "]", ")": "]", "}": "}"}


def json_of_python(text: str) -> str | None:
    """Return the JSON of a literal: tuples become arrays. None where the text is none, or has no JSON."""
    pieces: list[str] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            return None
        position = match.end()
        piece = _converted(match)
        if piece is None:
            return None
        if match["close"] and pieces and pieces[-1] == ", ":  # Python allows a comma behind the last item
            pieces.pop()
        pieces.append(piece)
    written = "".join(pieces)
    try:
        json.loads(written)
    except (ValueError, RecursionError):
        return None
    return written


def _converted(match: re.Match[str]) -> str | None:
    if match["string"]:
        return _string(match["string"])
    if match["number"]:
        return _number(match["number"])
    if match["word"]:
        return _WORDS.get(match["word"])
    if match["mark"]:
        return f"{match['mark']} "
    return _BRACKETS[match["open"] or match["close"]]


def _string(written: str) -> str | None:
    try:
        value = ast.literal_eval(written.replace("\n", "\\n").replace("\r", "\\r").replace("\0", "\\0"))
    except (ValueError, SyntaxError, MemoryError):
        return None
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate is no text that can be sent
        return None
    return json.dumps(value, ensure_ascii=False)


def _number(written: str) -> str:
    number = written.replace("_", "").removeprefix("+")
    sign, digits = ("-", number[1:]) if number.startswith("-") else ("", number)
    whole, dot, rest = digits.partition(".")
    if dot:
        fraction, exponent = re.match(r"(\d*)(.*)", rest).groups()  # type: ignore[union-attr]
        digits = f"{whole or '0'}.{fraction or '0'}{exponent}"
    return sign + digits
