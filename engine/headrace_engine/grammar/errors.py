"""Errors of grammars, with messages for the sender of the grammar."""

import re

from headrace_engine.errors import HeadraceEngineError

_MAX_ERROR_CHARS = 300
_ONE_OF = (
    "oneOf is supported only where its options cannot both hold, such as objects with a required property that is "
    "another const in each; use anyOf instead"
)
_TOO_COMPLEX = "the grammar is too complex: bound its repetitions, or give it fewer alternatives"
# Messages of the library that refer to its own options or internals, and what to say instead.
_OWN_WORDS = [
    (re.compile(r"oneOf constraints are not supported.*"), _ONE_OF),
    (re.compile(r"unknown field `[^`]*`, expected one of `item_separator`.*"), "x-guidance is not supported"),
    (
        re.compile(
            r"lexer error: too many .*|.*lexer precomputation failed.*|.*fuel exhausted.*|.*Too many items \(limit.*"
            r"|.*too big \(limit for this grammar.*|.*Current row has \d+ items; max is.*"
        ),
        _TOO_COMPLEX,
    ),
    (re.compile(r"; following special tokens are available: [^\n]*"), ""),
    (re.compile(r"; forced bytes: .*"), ""),
    (re.compile(r"(?i)\b(panic|internal error): .*"), "the grammar cannot be used: the library failed on it"),
    (re.compile(r"^Parser Error: "), ""),
]


class GrammarError(HeadraceEngineError):
    """A grammar cannot be compiled or advanced. The message says why."""


class DeadEndError(GrammarError):
    """No continuation satisfies the grammar."""


class TooComplexError(GrammarError):
    """The states of the automaton, or the work for one mask, exceed a limit."""


def failure(error: str) -> GrammarError:
    """Return the exception that fits a message of the library."""
    message = sentence(error)
    return TooComplexError(message) if message == _TOO_COMPLEX else GrammarError(message)


def sentence(error: str) -> str:
    """Return the message of the library in one short line, reworded if its advice does not apply."""
    if "NoExtension" in error:
        return "no text satisfies it"
    for theirs, ours in _OWN_WORDS:
        error = theirs.sub(ours, error)
    line = re.sub(r"\s+", " ", error.replace("<non-verbose/>", "")).strip()
    return line if len(line) <= _MAX_ERROR_CHARS else line[:_MAX_ERROR_CHARS] + "..."
