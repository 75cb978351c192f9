"""Converts GBNF (llama.cpp) and EBNF (xgrammar) to Lark, with fixes for llguidance's converter.

Faults of that converter: it garbles escapes such as `\\u00e9`. It takes `-`, `&` and `~` in character classes for
operators. `.` does not match a line end. It refuses a rule that continues with `|` in its next line.
"""

import re
import sys
from collections.abc import Iterator

from llguidance.gbnf_to_lark import gbnf_to_lark

_RULE = re.compile(r"(?m)^[ \t]*([\w-]+)[ \t]*::=")
_HEAD = re.compile(r"[\w-]+[ \t]*::=")
_PART = re.compile(
    r"""(?xs)
    (?P<comment>\#[^\n]*)
    | "(?P<literal>(?:\\.|[^"\\])*)"
    | \[(?P<class>(?:\\.|[^\]\\])*)\]
    | (?P<any>\.)
    | (?P<at_most>\{\s*(?=,))
    | (?P<end>\n\s*)
    | (?P<name>[\w-]+)
    | (?P<other>[\ \t\r]+|.)
    """
)
_CHARACTER = re.compile(r"(?s)\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\.|.")
_RANGE = re.compile(rf"(?s)({_CHARACTER.pattern[4:]})(?:-({_CHARACTER.pattern[4:]}))?")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "0": "\0"}
_ANY = "[\\x00-\U0010ffff]"


def is_gbnf(text: str) -> bool:
    """Whether any line of the grammar starts a rule of GBNF: `name ::=`."""
    return _RULE.search(text) is not None


def lark_of(text: str) -> str:
    """Convert a grammar to Lark's notation.

    A grammar without recursion becomes one terminal, which is matched as a whole. Otherwise each terminal matches as
    much text as it can.

    Raises:
        ValueError: the grammar is malformed.
    """
    rules = [match[1] for match in _RULE.finditer(text)]
    if "root" not in rules:
        raise ValueError("the grammar is GBNF, and has no rule root")
    # The index keeps names different whose letters become the same in Lark.
    names = {name: f"{re.sub('[^a-z]', '', name.lower())}-{index}-" for index, name in enumerate(rules)}
    try:
        return gbnf_to_lark(f"root ::= {names['root']}\n" + "".join(_parts(text, names)))
    except RecursionError:
        raise
    except Exception as error:
        problem = re.sub(r"at line \d+, ", "at ", str(error))
        for name, safe in names.items():
            problem = problem.replace(safe, name)
        raise ValueError(f"the grammar is no valid GBNF: {problem}") from error


def _parts(text: str, names: dict[str, str]) -> Iterator[str]:
    for match in _PART.finditer(text):
        kind, part = match.lastgroup, match[match.lastgroup or 0]
        if kind == "literal":
            yield f'"{"".join(_in_literal(_character(char)) for char in _CHARACTER.findall(part))}"'
        elif kind == "class":
            yield _class(part)
        elif kind == "any":
            yield _ANY
        elif kind == "at_most":
            yield "{0"
        elif kind == "end":  # the end of a rule, if another one follows
            yield "\n" if _HEAD.match(text, match.end()) or match.end() == len(text) else " "
        elif kind == "name":
            yield names.get(part, part)
        elif kind == "other":
            yield part


def _class(inside: str) -> str:
    negated = inside.startswith("^")
    ranges = []
    for first, last in _RANGE.findall(inside[negated:]):
        ranges.append(_in_class(_character(first)) + (f"-{_in_class(_character(last))}" if last else ""))
    return f"[{'^' * negated}{''.join(ranges)}]"


def _character(source: str) -> str:
    if not source.startswith("\\"):
        return source
    kind, digits = source[1], source[2:]
    if digits and (code := int(digits, 16)) <= sys.maxunicode and not 0xD800 <= code < 0xE000:
        return chr(code)
    if digits or (kind.isalnum() and kind not in _ESCAPES):
        raise ValueError(f"{source} stands for no character")
    return _ESCAPES.get(kind, kind)


def _in_literal(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return f"\\x{ord(char):02x}" if ord(char) < 32 or ord(char) == 127 else char


def _in_class(char: str) -> str:
    return char if char.isalnum() or ord(char) > 127 else f"\\x{ord(char):02x}"
