"""Converts Python literals to JSON without building values, so that deep nesting needs no recursion."""

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
_ESCAPE: Final = re.compile(r"(?s)\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.))")
_ESCAPES: Final = dict(
    zip("abfnrtv\\'\"\n", ["\a", "\b", "\f", "\n", "\r", "\t", "\v", "\\", "'", '"', ""], strict=True)
)
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")
_BRACKETS: Final = {"[": "[", "(": "[", "{": "{", "]": "]", ")": "]", "}": "}"}


def json_of_python(text: str) -> str | None:
    """Return the JSON of a literal; tuples become arrays. None if the text is no literal, or JSON cannot express it."""
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
        if match["close"] and pieces and pieces[-1] == ", ":  # Python allows a trailing comma
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
    """Return the JSON of a string. An escape unknown to Python stays as it is."""
    text = written.lstrip("rRuU")
    raw = len(written) - len(text) and written[0] in "rR"
    text = text[1:-1]
    if not raw:
        text = _ESCAPE.sub(_unescaped, text)
    return None if _SURROGATE.search(text) else json.dumps(text, ensure_ascii=False)


def _unescaped(match: re.Match[str]) -> str:
    code = match[1] or match[2] or match[3]
    if code:
        return chr(int(code, 16)) if int(code, 16) <= 0x10FFFF else match[0]
    if match[4]:
        return chr(int(match[4], 8))
    return _ESCAPES.get(match[5], match[0])


def _number(written: str) -> str:
    number = written.replace("_", "").removeprefix("+")
    sign, digits = ("-", number[1:]) if number.startswith("-") else ("", number)
    whole, dot, rest = digits.partition(".")
    if dot:
        fraction, exponent = re.match(r"(\d*)(.*)", rest).groups()  # type: ignore[union-attr]
        digits = f"{whole or '0'}.{fraction or '0'}{exponent}"
    return sign + digits
